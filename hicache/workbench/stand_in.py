"""A driver that stands in for a GPU: kernels are compiled for sm_90, and launches do nothing.

A launcher runs over CPU tensors as it would beside a GPU: arguments are specialized, kernels are
compiled and looked up, and the binaries that a driver would load are kept. No data moves.

The process must not have TRITON_INTERPRET set, because the interpreter compiles nothing.
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
    name: str
    cubin: bytes
    num_warps: int
    shared_bytes: int


class StandIn(DriverBase):  # type: ignore[misc] # triton is not typed
    """A fake Triton driver with one sm_90 GPU, so that kernels compile on machines without one.

    Launches do nothing. `loaded` holds each kernel that was compiled for a launch, and
    `num_launches` counts launches.
    """

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self.num_launches = 0
        self.utils = self
        self._metadata: Any = None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return SM_90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES}

    def launcher_cls(self, source: object, metadata: Any) -> Any:
        self._metadata = metadata

        def launch(*arguments: object) -> None:
            self.num_launches += 1

        return launch

    def load_binary(
        self, name: str, cubin: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        self.loaded.append(Loaded(name, cubin, self._metadata.num_warps, shared_bytes))
        return 0, 0, 0, 0, 1024


def stand_in() -> StandIn:
    """Make Triton use a fake driver with one sm_90 GPU in this process; return the driver.

    Raises:
        RuntimeError: TRITON_INTERPRET is set, so Triton would not compile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set, and leaves nothing to compile: unset it")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns until it is chosen
    driver = StandIn()
    triton.runtime.driver.set_active(driver)
    return driver
