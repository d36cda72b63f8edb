"""Which modules may be compiled, and whether they are.

`python -m experiments.compile` puts what mypyc makes of them beside them, where Python finds it
first. Nothing else differs: a run says the same bytes. Classes that others may inherit from stay
plain, or say that they may be inherited from.
"""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
STAMP = FOLDER / "compiled.sha256"  # of the modules as they were compiled
MODULES = (
    "cache/kinds.py",
    "cache/pages.py",
    "cache/prefix_cache.py",
    "cache/prefetch/prefetch.py",
    "cache/prefetch/prefetcher.py",
    "cache/prefetch/rates.py",
    *(f"cache/tiers/{name}.py" for name in ("device", "host", "storage_writes", "transfer")),
    *(f"cache/tree/{name}.py" for name in ("arrivals", "insertion", "keys")),
    *(f"cache/tree/{name}.py" for name in ("match", "node", "page_history", "radix_tree")),
    *(f"cache/tree/{name}.py" for name in ("residency", "sequence", "victims")),
    *(f"engine/{name}.py" for name in ("client_timeouts", "loop")),
    *(f"executor/{name}.py" for name in ("completions", "storage_script")),
    *(f"executor/simulated/{name}.py" for name in ("cost", "executor", "links", "stores")),
    "clock.py",
    "request.py",
    "results/recorder.py",
    *(f"scheduler/{name}.py" for name in ("admission", "batch", "budget", "decision", "decoding")),
    *(f"scheduler/{name}.py" for name in ("queue_waits", "request_state", "scheduler")),
)


def is_compiled() -> bool:
    """Whether they run compiled.

    Raises:
        RuntimeError: one was edited since, and would not run as it is written.
    """
    if not STAMP.is_file():
        return False
    if STAMP.read_text() != digest():
        raise RuntimeError(
            "hicache has changed since it was compiled: run `make fast` again, or `make plain`"
        )
    return True


def digest() -> str:
    """Of the modules as they are now."""
    hasher = hashlib.sha256()
    for name in MODULES:
        hasher.update((FOLDER / name).read_bytes())
    return hasher.hexdigest()
