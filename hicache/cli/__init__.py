"""From a command line to a run: config, job, provenance, and what the terminal shows."""
