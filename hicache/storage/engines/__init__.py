"""The storage engines."""
