"""The packages that are mutated: where their modules lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "cache": ["hicache/cache/**/*.py", "hicache/observe/*.py"],
    "scheduler": ["hicache/scheduler/*.py"],
    "engine": [
        "hicache/engine/**/*.py",
        "hicache/results/recorder.py",
        "hicache/experiment.py",
        "hicache/request.py",
    ],
    "storage": ["hicache/storage/**/*.py"],
    "diff": ["experiments/diff/*.py"],
    "executor": ["hicache/executor/storage_script.py", "hicache/executor/simulated/*.py"],
    "kernels": ["hicache/kernels/**/*.py", "hicache/workbench/**/*.py"],
}
# Left out: programs that print figures, clients of servers that are rarely installed, and what
# tests run in a process of its own (a bench on an imitated GPU, compilation). The sides of
# engines in folders of `experiments/diff` need the engine.
LEFT_OUT = {
    *(f"hicache/workbench/bench/{name}.py" for name in ("__main__", "cases", "contest", "figures")),
    *(f"hicache/workbench/bench/{name}.py" for name in ("device_cases", "link_cases", "measure")),
    *(f"hicache/workbench/{name}.py" for name in ("codegen_cases", "stand_in")),
    "hicache/storage/bench.py",
    "hicache/storage/engines/mooncake.py",
    "hicache/storage/integrations/sglang.py",
}


def modules(package: str) -> list[Path]:
    """The files of a package."""
    found = {path for pattern in PACKAGES[package] for path in ROOT.glob(pattern)}
    return sorted(found - {ROOT / name for name in LEFT_OUT})
