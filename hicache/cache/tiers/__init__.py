"""Copies between device, host and storage: page pools, eviction, back-up, load-back and writes."""
