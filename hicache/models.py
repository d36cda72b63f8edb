"""Shapes of real models, and of the machines that run them.

The numbers live in `conf/model/*.yaml` and `conf/hardware/*.yaml`, each with its source.
"""

from dataclasses import dataclass
from enum import Enum

GIB = 1 << 30


class ComponentKind(Enum):
    """A kind of state that a model keeps of the tokens it has read."""

    full = "full"
    swa = "swa"
    mamba = "mamba"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What one model keeps and computes, over all its layers and devices."""

    name: str = "???"
    source: str = "???"  # where the shapes were read
    max_len: int = 131072  # tokens of prompt and answer together
    window_len: int = 0  # sliding window in tokens; 0: no sliding-window layers
    num_full_layers: int = 0
    num_swa_layers: int = 0
    num_mamba_layers: int = 0
    default_tp: int = 1
    swa_device_share: float = 0.0
    swa_host_share: float = 0.0
    mamba_device_share: float = 0.0
    mamba_host_share: float = 0.0

    @property
    def components(self) -> tuple[ComponentKind, ...]:
        """The kinds of state this model keeps; full always among them."""
        kinds = [ComponentKind.full]
        if self.num_swa_layers:
            kinds.append(ComponentKind.swa)
        if self.num_mamba_layers:
            kinds.append(ComponentKind.mamba)
        return tuple(kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """What one machine can do."""

    name: str = "???"
