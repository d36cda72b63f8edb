"""Runs of a study, kept between calls by configuration, code, trace and policy."""

import json
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from hicache import experiment
from hicache.cli.job import as_yaml
from hicache.cli.schema import config_of
from hicache.cli.tables.provenance import provenance_of, sources_of
from hicache.results.metrics import Result

Measured = TypeVar("Measured")


def kept_runs(
    wanted: Sequence[Sequence[str]],
    measure: Callable[[Result], Measured],
    folder: Path,
    *,
    jobs: int,
) -> list[Measured]:
    """Run the experiments that are not in `folder` yet, and return what is measured of each.

    Each entry of `wanted` lists the overrides of one run. `jobs` is the number of processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = partial(_kept, measure=measure, folder=folder)
    if jobs == 1:
        return list(map(kept, wanted))
    # new processes: forks of one with threads may hang
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(pool.map(kept, wanted))


def _kept(
    overrides: Sequence[str], measure: Callable[[Result], Measured], folder: Path
) -> Measured:
    config = config_of(*overrides)
    sources = json.dumps(sources_of(provenance_of(config)))
    file = folder / f"{sha256((as_yaml(config) + sources).encode()).hexdigest()[:16]}.pkl"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_bytes(pickle.dumps(measure(experiment.run(config))))
        part.rename(file)
    found: Measured = pickle.loads(file.read_bytes())
    return found
