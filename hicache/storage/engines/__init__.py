"""The storage engines, one module each."""
