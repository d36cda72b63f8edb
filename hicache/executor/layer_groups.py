"""The groups of layers that a load-back is cut into, and that a step waits for one by one."""

NUM_LAYER_GROUPS = 4


def layer_groups(num_layers: int) -> list[range]:
    """Return at most `NUM_LAYER_GROUPS` consecutive ranges that hold all layers."""
    size = max(-(-num_layers // NUM_LAYER_GROUPS), 1)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
