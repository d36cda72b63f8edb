"""Records why a run computes tokens, and a timeline of all its events."""
