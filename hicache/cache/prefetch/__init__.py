"""Prefetch from storage to host: what is read, how fast, and when a request stops waiting."""
