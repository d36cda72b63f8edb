"""Storage to host, ahead of need: what is asked for, when a request stops waiting, at what rates."""
