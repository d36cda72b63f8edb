"""Real time: torch, real memory, copies on streams, storage in threads."""
