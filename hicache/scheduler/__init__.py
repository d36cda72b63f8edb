"""Which request runs next, and what it may spend."""
