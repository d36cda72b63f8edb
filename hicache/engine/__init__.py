"""The serving loop, its interfaces, routing, and the ranks of an engine."""
