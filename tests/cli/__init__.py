"""Tests of the `hicache` command."""
