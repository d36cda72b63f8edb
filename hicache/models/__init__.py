"""Models and machines: what is kept and computed, and how fast."""

from hicache.models.machines import CopyKernelConfig, Figure, HardwareConfig, RateTable
from hicache.models.shapes import GIB, ComponentKind, ModelConfig

__all__ = [
    "GIB",
    "ComponentKind",
    "CopyKernelConfig",
    "Figure",
    "HardwareConfig",
    "ModelConfig",
    "RateTable",
]
