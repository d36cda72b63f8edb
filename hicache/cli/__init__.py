"""The command line: composes the config, runs jobs, and prints and compares their results."""
