"""A driver that stands in for a GPU: kernels are compiled for sm_90, and launches go nowhere.

With it a launcher runs as it would beside a GPU, over CPU tensors: arguments are specialised,
kernels are compiled and looked up, and what the driver would be handed is kept. Nothing is moved.

The process must not have TRITON_INTERPRET set: the interpreter leaves nothing to compile.
"""

import os
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

SM_90 = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 << 10


class Loaded(NamedTuple):
    """A kernel that was launched for the first time."""

    name: str
    cubin: bytes
    num_warps: int
    shared_bytes: int


class StandIn(DriverBase):  # type: ignore[misc] # triton is not typed
    """Says that an sm_90 device is there.

    `loaded` holds every kernel that was launched, once; `num_launches` counts the launches.
    """

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self.num_launches = 0
        self.utils = self
        self._metadata: Any = None

    @classmethod
    def is_active(cls) -> bool:
        """Always; the driver is set by hand."""
        return True

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are compiled for."""
        return SM_90

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the stand-in arguments live."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is launched, so no C type is needed."""
        return ty

    def get_benchmarker(self) -> None:
        """Nothing is timed."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What triton asks before it loads a kernel."""
        return {"max_shared_mem": MAX_SHARED_BYTES}

    def launcher_cls(self, source: object, metadata: Any) -> Any:
        """What a compiled kernel is launched with."""
        self._metadata = metadata

        def launch(*arguments: object) -> None:
            self.num_launches += 1

        return launch

    def load_binary(
        self, name: str, cubin: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Keep a kernel; returns handles, registers, spills and the most threads of a program."""
        self.loaded.append(Loaded(name, cubin, self._metadata.num_warps, shared_bytes))
        return 0, 0, 0, 0, 1024


def stand_in() -> StandIn:
    """Make the stand-in the driver of this process.

    Raises:
        RuntimeError: kernels would be interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set, and leaves nothing to compile: unset it")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns until it is chosen
    driver = StandIn()
    triton.runtime.driver.set_active(driver)
    return driver
