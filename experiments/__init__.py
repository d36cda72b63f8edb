"""Programs that ask questions of the library: run, sweep, compare."""
