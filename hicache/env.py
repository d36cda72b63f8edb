"""Shows the environment for hicache: `python -m hicache.env` prints it.

Versions come from package metadata. Only torch is imported, to find its devices.
"""

import importlib.util
import os
import platform
import shutil
from importlib import metadata

from hicache.secret import masked

PACKAGES = (
    "hicache", "torch", "triton", "numpy", "einops", "hydra-core", "omegaconf", "wandb", "rich",
    "xxhash", "msgspec", "matplotlib", "pyarrow", "pooch", "hydra-joblib-launcher",
    "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda",
)  # fmt: skip
VARIABLES = ("HICACHE_DATA", "WANDB_MODE", "WANDB_BASE_URL", "TRITON_INTERPRET")


def describe_environment() -> dict[str, str]:
    """Return the facts about this machine that a bug report should contain, by name.

    Examples are the versions of Python and of packages, the GPUs, and environment variables.
    """
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                    else os.cpu_count()),
    }  # fmt: skip
    for package in PACKAGES:
        found[package] = version(package)
    found["devices"] = _devices()
    found["redis-server"] = shutil.which("redis-server") or "not found"
    for variable in VARIABLES:
        found[variable] = masked(os.environ.get(variable, "not set"))
    return found


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    if importlib.util.find_spec("torch") is None:
        return "none: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda})"


def main() -> None:
    for name, value in describe_environment().items():
        print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
