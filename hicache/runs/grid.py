"""The jobs of a sweep: the overrides of each, and the name of its directory.

The name of a job is its number and the settings that differ between jobs, as in
`7_eviction=lru,host_gib=64,seed=0`. Jobs of older sweeps have only a number.
"""

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from hicache.runs.stored import read_yaml

MAX_NAME = 160  # characters; file systems allow 255 bytes
MOST_JOBS = 100_000
NUMBERED = re.compile(r"(\d+)(?:_|$)")


def choices_of(overrides: Sequence[str]) -> dict[str, list[str]]:
    hydra = GlobalHydra.instance()
    loader = hydra.config_loader() if hydra.is_initialized() else None  # for glob(*)
    return {
        key: [f"{key}={value}" for value in islice(each.sweep_string_iterator(), MOST_JOBS + 1)]
        if each.is_sweep_override()
        else [str(each.input_line)]
        for each in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        for key in [each.get_key_element()]
    }


def jobs_of(choices: dict[str, list[str]]) -> list[list[str]]:
    if prod(map(len, choices.values())) > MOST_JOBS:
        raise ValueError(f"a sweep has at most {MOST_JOBS:,} jobs")
    return [list(job) for job in product(*choices.values())]


def choices_of_sweep(hydra: Mapping[str, Any]) -> dict[str, list[str]]:
    params = [f"{key}={value}" for key, value in (hydra["sweeper"]["params"] or {}).items()]
    return choices_of([*params, *hydra["overrides"]["task"]])


@cache
def stored_choices(directory: Path) -> dict[str, list[str]]:
    return read_choices(directory)


def read_choices(directory: Path) -> dict[str, list[str]]:
    file = directory / "multirun.yaml"
    stored = read_yaml(file, dict)
    try:
        return choices_of_sweep(stored["hydra"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} describes no sweep ({error})") from error


def varied(overrides: Sequence[str], choices: dict[str, list[str]]) -> list[str]:
    keys = {key for key, values in choices.items() if len(values) > 1}
    # Hydra escapes the colon of module:Class
    return [re.sub(r"\\(.)", r"\1", each) for each in overrides if each.partition("=")[0] in keys]


def name_of(number: int, overrides: Sequence[str]) -> str:
    pairs = [each.lstrip("+").split("=", 1) for each in overrides]
    ends = Counter(key.rpartition(".")[2] for key, _ in pairs)
    parts = []
    for key, value in pairs:
        end = key.rpartition(".")[2]
        parts.append((end if ends[end] == 1 else key) + "=" + re.sub(r"[^\w.+-]+", "_", value))
    return "_".join(filter(None, [str(number), ",".join(parts)]))[:MAX_NAME]


def new_dir(name: str) -> Path:
    """Return a path for the results of a run or sweep of this name, as Hydra names them."""
    return Path("outputs", name, f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}_{secrets.token_hex(3)}")


def find_jobs(directory: Path) -> dict[int, Path]:
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := NUMBERED.match(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def subdir(*, _root_: Any) -> str:
    hydra = _root_.hydra
    directory, number = Path(hydra.sweep.dir), int(hydra.job.num)
    begun = find_jobs(directory).get(number)
    if begun is not None:  # continue in this directory, even if an earlier version named it
        return begun.name
    return name_of(number, varied(hydra.overrides.task, stored_choices(directory)))
