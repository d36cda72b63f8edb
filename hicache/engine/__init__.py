"""The serving loop, what it asks of others, routing, and the ranks of an engine."""
