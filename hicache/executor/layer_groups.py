"""Groups of layers: a load-back is split into them, and a step waits for each separately."""

NUM_LAYER_GROUPS = 4


def layer_groups(num_layers: int) -> list[range]:
    size = max(-(-num_layers // NUM_LAYER_GROUPS), 1)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
