"""Benchmarks: `python -m benchmarks` runs all of them in a short form; docs/benchmarks.md explains the columns."""
