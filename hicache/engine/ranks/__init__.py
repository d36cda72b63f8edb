"""Parallel ranks of one engine, in one process or several, and what they agree on."""
