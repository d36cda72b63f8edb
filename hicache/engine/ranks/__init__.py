"""Parallel ranks of one engine: what they agree on, in one process and in several."""
