"""Storage engines: the tier of the cache below device and host memory."""
