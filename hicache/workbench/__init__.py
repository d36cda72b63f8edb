"""Checks, reads and measures kernels: this project's, those of other engines, and yours."""
