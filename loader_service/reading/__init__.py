"""The disk: one small protocol, positioned reads, open files with identity, daemon threads."""
