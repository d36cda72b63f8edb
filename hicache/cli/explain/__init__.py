"""Explains the requests of a run: what each waited for, in words or as a trace for Perfetto."""
