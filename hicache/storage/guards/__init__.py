"""Wrappers between the cache and a storage engine: deadlines, breaker, faults."""
