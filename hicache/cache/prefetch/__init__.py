"""Storage to host, ahead of need: what is read, at what rates, and when a request stops waiting."""
