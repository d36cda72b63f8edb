"""Executors: they carry out a step's forward pass, copies and storage I/O."""
