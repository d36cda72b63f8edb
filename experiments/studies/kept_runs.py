"""Runs of a study, kept between calls by configuration, code, trace and policy."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from joblib import Memory, Parallel, delayed

from hicache import experiment
from hicache.results.metrics import Result
from hicache.runs.checks import as_yaml
from hicache.runs.provenance import provenance_of, sources_of
from hicache.runs.schema import config_of

Measured = TypeVar("Measured")


def kept_runs(
    wanted: Sequence[Sequence[str]],
    measure: Callable[[Result], Measured],
    folder: Path,
    *,
    jobs: int,
) -> list[Measured]:
    """Run the experiments that are not in `folder` yet, and return what is measured of each.

    Each entry of `wanted` lists the overrides of one run. `measure` must be the same in all calls
    with one `folder`. `jobs` is the number of processes.
    """
    found: list[Measured] = Parallel(jobs)(delayed(_kept)(each, measure, folder) for each in wanted)
    return found


def _kept(
    overrides: Sequence[str], measure: Callable[[Result], Measured], folder: Path
) -> Measured:
    config = config_of(*overrides)
    sources = json.dumps(sources_of(provenance_of(config)))
    # joblib identifies a run by `config` and `sources`; it cannot hash functions of `__main__`
    run = Memory(folder, verbose=0).cache(_run, ignore=["measure", "overrides"])
    found: Measured = run(measure, as_yaml(config), sources, overrides=overrides)
    return found


def _run(
    measure: Callable[[Result], Measured], config: str, sources: str, *, overrides: Sequence[str]
) -> Measured:
    return measure(experiment.run(config_of(*overrides)))
