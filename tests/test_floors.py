"""The library is a building: imports go to floors and rooms below, and never in circles."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# a name stands for itself and everything inside it
FLOORS = [
    [
        "hicache.config",
        "hicache.request",
        "hicache.clock",
        "hicache.secret",
        "hicache.user_code",
        "hicache.models",
        "hicache.env",
    ],
    ["hicache.kernels", "hicache.storage", "hicache.workload"],
    ["hicache.cache"],
    ["hicache.memory"],
    ["hicache.scheduler", "hicache.executor"],
    ["hicache.policies"],
    ["hicache.engine"],
    ["hicache.observe"],
    ["hicache.results"],
    ["hicache.workbench"],
    ["hicache.experiment"],
    ["hicache.runs"],
    ["hicache.cli"],
    ["hicache.api"],
    ["hicache.__main__"],
    ["experiments"],
]
# neighbours on one floor that may be used, in this direction only
NEIGHBOURS = {
    ("hicache.config", "hicache.models"),
    ("hicache.executor", "hicache.scheduler"),
    ("hicache.env", "hicache.secret"),
}
# the rooms of a package in order: what is inside one uses itself and those before it
ROOMS = {
    "hicache.cache": [
        "kinds",
        "pages",
        "checked",
        "named",
        "tree",
        "tiers",
        "windows",
        "prefix_cache",
        "prefetch",
    ],
    "hicache.executor": ["completions", "storage_script", "simulated", "real"],
    "hicache.engine": [
        "ports",
        "loop",
        "ranks",
        "deployment",
        "simulated_runtime",
        "warm",
        "build",
    ],
    "hicache.storage": [
        "base",
        "digest",
        "guards",
        "engines",
        "factory",
        "bench",
        "integrations",
    ],
    "hicache.results": [
        "metrics",
        "keys",
        "verdict",
        "tracking",
        "report",
        "recorder",
        "measures",
    ],
    "hicache.runs": [
        "stored",
        "grid",
        "schema",
        "errors",
        "provenance",
        "checks",
        "goodput",
        "job",
    ],
    "hicache.cli": [
        "console",
        "progress",
        "tables",
        "command",
        "knobs",
        "terminal",
        "sweep",
        "resume",
        "run",
        "explain",
        "compare",
        "check_policy",
        "main",
    ],
}
# what only some may import, wherever in a module the import stands
ONLY_IN = {
    "hydra": ("hicache.runs", "hicache.cli", "experiments"),
    "omegaconf": ("hicache.runs", "hicache.cli", "experiments"),
    "wandb": ("hicache.results.tracking",),
    "matplotlib": (
        "hicache.results.report",
        "hicache.workbench.bench",
        "hicache.cli",
        "hicache.api",
        "experiments",
    ),
    "torch": (
        "hicache.kernels",
        "hicache.workbench",
        "hicache.executor.real",
        "hicache.env",
        "hicache.storage.integrations",
        "experiments",
    ),
    "sglang": ("hicache.storage.integrations.sglang", "experiments"),
    "triton": ("hicache.kernels", "hicache.workbench", "experiments"),
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_of(path): path
    for top in ("hicache", "experiments")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def imports_of(source: str) -> set[str]:
    """Modules a source imports, lazily or not; `from package import module` is that module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def floor_of(module: str) -> tuple[int, str]:
    """The number of its floor, and its name there."""
    found = [(n, name) for n, names in enumerate(FLOORS) for name in names if is_in(module, name)]
    assert found, f"{module} stands on no floor; add it to FLOORS"
    return found[0]


def room_of(module: str, package: str) -> int | None:
    """The place of its room in the order of the package's; None: it has no place in it."""
    rooms = enumerate(ROOMS.get(package, []))
    return next((place for place, name in rooms if is_in(module, f"{package}.{name}")), None)


def forbidden(module: str, target: str) -> bool:
    """Whether the building has no way from `module` to `target`."""
    top = target.partition(".")[0]
    if top in ONLY_IN:
        return not any(is_in(module, place) for place in ONLY_IN[top])
    if top not in ("hicache", "experiments") or target == "hicache":
        return False
    if is_in(target, "hicache.storage.integrations"):
        # other systems import it, and here what runs inside SGLang
        return not is_in(module, "experiments.diff.sglang")
    (floor, name), (target_floor, target_name) = floor_of(module), floor_of(target)
    if name == target_name:
        room, target_room = room_of(module, name), room_of(target, name)
        return room is not None and target_room is not None and target_room > room
    return (name, target_name) not in NEIGHBOURS and target_floor >= floor


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    imports = imports_of(MODULES[module].read_text())
    if module == "hicache":  # it imports the calls on first use
        assert imports == {"importlib", "typing", "hicache.api"}
        return
    assert [name for name in imports if forbidden(module, name)] == []


def test_there_is_no_circle():
    graph = {
        module: (imports_of(path.read_text()) & set(MODULES)) - {module, "hicache"}
        for module, path in MODULES.items()
        if module != "hicache"
    }
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hicache.cache.tree.radix_tree", "from hicache.scheduler.admission import StepBudget"),
        ("hicache.cache.tree.radix_tree", "import torch"),
        ("hicache.cache.tree.radix_tree", "def late():\n    from hicache import experiment"),
        ("hicache.storage.engines.slab", "from hicache.workload.trace import load"),
        ("hicache.config", "from omegaconf import MISSING"),
        ("hicache.engine.loop", "import wandb"),
        ("hicache.storage.factory", "import torch"),
        ("hicache.storage.factory", "from hicache.storage.integrations.sglang import HiCacheStore"),
        ("hicache.scheduler.scheduler", "from hicache.engine.ports import Executor"),
        ("hicache.executor.simulated.executor", "import torch"),
        ("hicache.cache.tree.node", "from hicache.cache.tiers.transfer import Transfer"),
        ("hicache.cache.tree.node", "from hicache.cache import prefix_cache"),
    ],
)
def test_an_import_that_goes_up_is_seen(module, source):
    assert any(forbidden(module, name) for name in imports_of(source))
