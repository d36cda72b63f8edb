"""The prefix cache: a radix tree that decides, and a controller that queues the work."""
