"""Programs for a machine with a GPU: one script, and what it calls."""
