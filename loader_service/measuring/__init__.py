"""Measures what this machine gives at best, and says in words what bounds a load."""
