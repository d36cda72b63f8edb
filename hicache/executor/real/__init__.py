"""Real time: torch, real memory, copies on streams, storage I/O in threads."""
