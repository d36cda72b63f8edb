"""The bench of the kernels: `python -m hicache.workbench.bench`."""
