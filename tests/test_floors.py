"""The library is a building: a module imports only from floors below its own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# a name stands for itself and everything inside it; modules of one name may import each other
FLOORS = [
    ["hicache.config", "hicache.request", "hicache.clock", "hicache.models", "hicache.env"],
    [
        "hicache.kernels",
        "hicache.storage",
        "hicache.workload",
        "hicache.metrics",
        "hicache.tracking",
        "hicache.report",
    ],
    ["hicache.cache"],
    ["hicache.capacity"],
    ["hicache.scheduler", "hicache.executor"],
    ["hicache.engine"],
    [
        "hicache.lockstep",
        "hicache.recorder",
        "hicache.routing",
        "hicache.warm",
    ],
    ["hicache.runtime"],  # this and what stands below, to the engine, are pieces of the experiment
    ["hicache.experiment"],
    ["experiments"],
]
# neighbours on one floor that may be used, in this direction only
NEIGHBOURS = {
    ("hicache.config", "hicache.models"),
    ("hicache.tracking", "hicache.metrics"),
    ("hicache.report", "hicache.metrics"),
    ("hicache.executor", "hicache.scheduler"),
}
MODULES = sorted(path for top in ("hicache", "experiments") for path in (ROOT / top).rglob("*.py"))
# what only some may import, wherever in a module the import stands
ONLY_IN = {
    "hydra": ("experiments",),
    "omegaconf": ("experiments",),
    "wandb": ("hicache.tracking",),
    "matplotlib": ("hicache.report", "hicache.kernels.bench_figures", "experiments"),
    "torch": (
        "hicache.kernels",
        "hicache.executor",
        "hicache.env",
        "hicache.storage.sglang",
        "experiments",
    ),
    "sglang": ("hicache.storage.sglang", "experiments"),
    "triton": ("hicache.kernels", "experiments"),
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def name_of(module: str) -> str:
    names = [name for floor in FLOORS for name in floor if is_in(module, name)]
    assert names, f"{module} stands on no floor; add it to FLOORS"
    return names[0]


def floor_of(module: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if name_of(module) in names)


def is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def imports_of(source: str) -> set[str]:
    """Modules a source imports, lazily or not; `from package import module` counts as both."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "hicache":
            found |= {f"hicache.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def forbidden(module: str, target: str) -> bool:
    """Whether the building has no way from `module` to `target`."""
    top = target.partition(".")[0]
    if top in ONLY_IN:
        return not any(is_in(module, place) for place in ONLY_IN[top])
    if top not in ("hicache", "experiments") or target == "hicache":
        return False
    if is_in(target, "hicache.storage.sglang"):
        return True  # SGLang imports it, nobody else
    if name_of(module) == name_of(target):
        return False
    return (name_of(module), name_of(target)) not in NEIGHBOURS and floor_of(target) >= floor_of(
        module
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    module = module_of(path)
    if module == "hicache":
        assert not imports_of(path.read_text())
        return
    assert [name for name in imports_of(path.read_text()) if forbidden(module, name)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hicache.cache.tree", "from hicache.scheduler.budget import Budget"),
        ("hicache.cache.tree", "import torch"),
        ("hicache.cache.tree", "def late():\n    from hicache import experiment"),
        ("hicache.storage.slab", "from hicache.workload.traces import load"),
        ("hicache.config", "from omegaconf import MISSING"),
        ("hicache.engine", "import wandb"),
        ("hicache.storage.build", "import torch"),
        ("hicache.storage.build", "from hicache.storage.sglang import HiCacheStore"),
        ("hicache.scheduler.scheduler", "from hicache.executor.base import Executor"),
    ],
)
def test_an_import_that_goes_up_is_seen(module, source):
    assert any(forbidden(module, name) for name in imports_of(source))
