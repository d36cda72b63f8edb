"""What a run records about itself: why tokens are computed, and a timeline of all that happened."""
