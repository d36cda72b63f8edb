"""A three-tier prefix cache for hybrid language models, built for research.

`hicache.run`, `sweep`, `load` and `compare` are imported on first use, so that the cache and the
kernels can be imported without Hydra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache.api import Run, Sweep, compare, load, run, sweep

__version__ = "0.2.0"

__all__ = ["Run", "Sweep", "compare", "load", "run", "sweep"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("hicache.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
