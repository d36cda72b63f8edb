"""The scheduler: which request runs next, and what it may use."""
