"""Layers of the library: a module imports only from layers below its own, and never in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# from the lowest layer to the highest; a name stands for itself and everything inside it
FLOORS = [
    [f"hicache.{name}" for name in names.split()]
    for names in (
        "config rules knob request clock secret user_code models env",
        "kernels storage workload",
        "cache",
        "memory",
        "scheduler executor",
        "policies",
        "engine",
        "observe",
        "results",
        "workbench",
        "experiment",
        "fleet",
        "runs",
        "cli",
        "api",
        "__main__",
    )
] + [["experiments"]]
# imports within one layer that are allowed, in this direction only
NEIGHBORS = {
    ("hicache.config", "hicache.models"),
    ("hicache.config", "hicache.rules"),
    ("hicache.config", "hicache.knob"),
    ("hicache.rules", "hicache.knob"),
    ("hicache.executor", "hicache.scheduler"),
    ("hicache.env", "hicache.secret"),
}
# the parts of a package in order: each imports itself and the parts before it
ROOMS = {
    "hicache.cache": "kinds pages checked named tree tiers windows prefix_cache prefetch",
    "hicache.executor": "completions storage_script simulated real",
    "hicache.engine": "ports loop ranks deployment simulated_runtime warm build",
    "hicache.storage": "base digest guards engines factory bench integrations",
    "hicache.results": "metrics roles keys verdict tracking report figures recorder measures",
    "hicache.runs": "stored grid schema errors provenance checks goodput job",
    "hicache.cli": (
        "console progress tables command knobs terminal sweep sweeper resume until run explain "
        "compare report check_policy main"
    ),
}
ABOVE_RUNS = ("hicache.runs", "hicache.cli", "experiments")
# libraries that only some modules may import, wherever in a module the import stands
ONLY_IN = {
    "hydra": ABOVE_RUNS,
    "omegaconf": ABOVE_RUNS,
    "wandb": ("hicache.results.tracking",),
    "matplotlib": (
        *("hicache.results.figures", "hicache.workbench.bench", "hicache.cli", "hicache.api"),
        "experiments",
    ),
    "torch": (
        *("hicache.kernels", "hicache.workbench", "hicache.executor.real", "hicache.env"),
        *("hicache.storage.integrations", "experiments"),
    ),
    "sglang": ("hicache.storage.integrations.sglang", "experiments"),
    "triton": ("hicache.kernels", "hicache.workbench", "experiments"),
}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_of(path): path
    for top in ("hicache", "experiments")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def imports_of(source):
    """Modules a source imports, lazily or not; `from package import module` is that module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def is_in(module, package):
    return f"{module}.".startswith(f"{package}.")


def floor_of(module):
    """The number of the module's layer, and the name there that holds it."""
    found = [(n, name) for n, names in enumerate(FLOORS) for name in names if is_in(module, name)]
    assert found, f"{module} is in no layer; add it to FLOORS"
    return found[0]


def room_of(module, package):
    """The place of the module's part in its package; None if it has no place in the order."""
    rooms = enumerate(ROOMS.get(package, "").split())
    return next((place for place, name in rooms if is_in(module, f"{package}.{name}")), None)


def forbidden(module, target):
    """True if `module` may not import `target`."""
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
    return (name, target_name) not in NEIGHBORS and target_floor >= floor


def test_modules_import_only_from_layers_below_and_without_cycles():
    imports = {module: imports_of(path.read_text()) for module, path in MODULES.items()}
    # the package imports its calls on first use
    assert imports.pop("hicache") == {"importlib", "typing", "hicache.api"}
    wrong = [
        (module, name) for module in imports for name in imports[module] if forbidden(module, name)
    ]
    assert wrong == []
    graph = {module: names & imports.keys() - {module} for module, names in imports.items()}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hicache.cache.tree.radix_tree", "def late():\n    from hicache import experiment"),
        ("hicache.storage.factory", "import torch"),
        ("hicache.storage.factory", "from hicache.storage.integrations.sglang import HiCacheStore"),
        ("hicache.scheduler.scheduler", "from hicache.engine.ports import Executor"),
        ("hicache.cache.tree.node", "from hicache.cache.tiers.transfer import Transfer"),
        ("hicache.cache.tree.node", "from hicache.cache import prefix_cache"),
    ],
)
def test_an_import_from_a_layer_above_is_found(module, source):
    assert any(forbidden(module, name) for name in imports_of(source))
