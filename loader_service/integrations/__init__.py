"""Adapters for engines, each in a module of its own that is imported by whoever uses it: no engine is imported here."""
