"""The packages that are mutated: where their modules lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ("engine", "lockstep", "routing", "runtime", "recorder", "warm", "experiment", "request")
PACKAGES = {
    "cache": ["hicache/cache/*.py"],
    "scheduler": ["hicache/scheduler/*.py"],
    "engine": [f"hicache/{name}.py" for name in ENGINE],
    "storage": ["hicache/storage/*.py"],
    "executor": [f"hicache/executor/{name}.py" for name in ("simulated", "cost", "links")],
}
# a program that prints figures, and clients of what is seldom there
LEFT_OUT = {f"hicache/storage/{name}.py" for name in ("bench", "mooncake", "sglang")}


def modules(package: str) -> list[Path]:
    """The files of a package."""
    found = {path for pattern in PACKAGES[package] for path in ROOT.glob(pattern)}
    return sorted(found - {ROOT / name for name in LEFT_OUT})
