"""What stands between the cache and an engine: deadlines, breaker, checksums, faults."""
