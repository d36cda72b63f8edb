"""A run from its settings to its files: one job behind the command line, Python and experiments."""
