"""What carries out a step: the forward pass, the copies and the storage I/O."""
