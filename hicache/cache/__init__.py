"""The prefix cache: a radix tree that decides, and a thin controller that executes."""
