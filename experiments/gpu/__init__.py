"""What a session on a GPU runs: one script, and what it calls."""
