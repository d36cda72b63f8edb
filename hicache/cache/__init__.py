"""The prefix cache: a radix tree takes the decisions, and a controller queues the copies."""
