"""Tests of the checkpoint floor."""
