"""Simulated time: a cost model for steps, shared links for copies."""
