"""The radix tree: nodes, matching, locks, insertion and eviction."""
