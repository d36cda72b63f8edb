"""Storage engines: the third tier. Nothing here imports torch."""
