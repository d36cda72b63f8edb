"""What became of each request of a run, and why: its life in words, and a trace of everything."""
