"""Moves between device, host and storage: pools, eviction, back-up, load-back, storage writes."""
