"""Adapters for engines, each in a module of its own for whoever uses it: nothing is loaded here, and no engine."""
