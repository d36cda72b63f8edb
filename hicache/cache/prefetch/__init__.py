"""Prefetch from storage to host: what is read, at which rate, and when a request stops waiting."""
