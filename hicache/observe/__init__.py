"""Records why requests of a run compute tokens instead of hitting the cache, and all events."""
