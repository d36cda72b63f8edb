"""The bench of the kernels: `python -m hicache.kernels.bench`."""
