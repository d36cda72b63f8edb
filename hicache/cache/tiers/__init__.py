"""What moves between device, host and storage: pools, room, back-up, load-back, storage writes."""
