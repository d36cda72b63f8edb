"""A driver that stands in for a GPU: kernels are compiled for sm_90, and launches do nothing.

A launcher runs over CPU tensors as it would beside a GPU: arguments are specialized, kernels are
compiled and looked up, and the binaries that a driver would load are kept. No data moves.

The process must not have TRITON_INTERPRET set, because the interpreter compiles nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.errors import CompilationError
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

SM_90 = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 << 10
NUM_SMS = 132
# what libraries ask torch when they are imported; they choose configurations by it
HOPPER: dict[str, Any] = {
    "device_count": lambda: 1,
    "get_device_name": lambda *_: "NVIDIA H200",
    "get_device_capability": lambda *_: (9, 0),
}
NOT_COMPILED = (OutOfResources, CompilationError, PTXASError)


class Loaded(NamedTuple):
    name: str
    cubin: bytes
    num_warps: int
    shared_bytes: int


class StandIn(DriverBase):  # type: ignore[misc] # triton is not typed
    """A fake Triton driver with one sm_90 GPU, so that kernels compile on machines without one.

    Launches do nothing. `loaded` holds each kernel that was compiled for a launch, `not_compiled`
    names the configurations of autotuned kernels that do not compile, and `num_launches` counts
    launches.
    """

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self.not_compiled: list[str] = []
        self.suffix = ""  # of the names of kernels
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
        return {"max_shared_mem": MAX_SHARED_BYTES, "multiprocessor_count": NUM_SMS}

    def launcher_cls(self, source: object, metadata: Any) -> Any:
        self._metadata = metadata

        def launch(*arguments: object) -> None:
            self.num_launches += 1

        return launch

    def load_binary(
        self, name: str, cubin: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        name += self.suffix
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


@contextmanager
def tuned(driver: StandIn | None = None, *, turn: int = 0) -> Iterator[list[str]]:
    """Run autotuned kernels without timing their configurations, which needs a GPU.

    With a driver, a launch compiles every configuration; those that fail are named in the driver's
    `not_compiled`. Without one, for the interpreter, a launch runs number `turn` of the
    configurations, counted in a circle. The result is filled with the configurations that ran.
    """
    ran, every, driver = list[str](), driver is not None, driver or StandIn()

    def run(tuner: Any, *arguments: object, **options: object) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
        configs = tuner.prune_configs(options)
        for config in configs if every else [configs[turn % len(configs)]]:
            ran.append(f" [{config}]")
            driver.suffix, given = ran[-1], options | config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook(tuner.nargs | given)
            try:
                tuner.fn.run(*arguments, **given)
            except NOT_COMPILED as error:
                if not every:
                    raise
                driver.not_compiled.append(f"{tuner.base_fn.__name__}{ran[-1]}: {error}")
            driver.suffix = ""

    with patch.object(Autotuner, "run", run):
        yield ran
