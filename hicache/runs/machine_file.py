"""Machine files: a profile of `conf/hardware` with measured or fitted values, as one file.

A machine file is YAML with `base` (the profile below it), `hardware` and `scheduler` (the values
that replace those of the profile). `hardware=FILE.yaml` uses it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from hicache.runs.stored import read_yaml

# all that a machine file may set, since it may be of another user
SECONDS = ("scheduler.server_s", "scheduler.begin_s")
ALLOWED = ("hardware.", *SECONDS)


def machine_overrides(path: Path) -> list[str]:
    """Return the overrides that a machine file stands for.

    Raises:
        ValueError: the file is no machine file.
    """
    if not path.is_file():
        raise ValueError(f"hardware={path}: the file does not exist")
    machine = read_yaml(path, dict)
    base = machine.pop("base", None)
    values = dict(_flat(machine))
    if odd := [key for key in values if not key.startswith(ALLOWED)]:
        raise ValueError(f"hardware={path}: a machine file must not set {', '.join(sorted(odd))}")
    if odd := [key for key, value in values.items() if "${" in value]:
        raise ValueError(f"hardware={path}: {', '.join(odd)} must be a value, without ${{...}}")
    if not isinstance(base, str) or not base.isidentifier():
        raise ValueError(
            f"hardware={path}: base must name a profile of conf/hardware, got {base!r}"
        )
    return [f"hardware={base}", *(f"{key}={value}" for key, value in values.items())]


def _flat(node: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(node, dict):
        yield prefix, json.dumps(node, ensure_ascii=False)
        return
    for key, value in node.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
