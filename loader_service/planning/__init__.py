"""Pure planning: which bytes of which file every rank reads, and where they go."""
