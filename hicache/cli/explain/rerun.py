"""Repeats a stored run with all events recorded.

A simulated run depends only on its configuration, so the stored run needs no event log. The stored
run may come from anyone: nothing is imported from its directory or from the one where it was
started, no server that it names is contacted, and code that it names runs only if the user trusts
it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hicache import experiment
from hicache.config import ExperimentConfig, TraceConfig
from hicache.observe.timeline import Timeline
from hicache.results.metrics import RequestRecord, summarize
from hicache.runs import provenance
from hicache.runs.schema import stored_config
from hicache.runs.stored import CONFIG_FILE, read_summary

ASKED = ("computed", "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    config: ExperimentConfig
    records: dict[int, RequestRecord]
    summary: dict[str, float | int]
    timeline: Timeline
    differences: tuple[str, ...]

    def engine_name(self, number: int) -> str:
        num_prefill = self.config.parallel.prefill
        role = ("prefill " if number < num_prefill else "decode ") if num_prefill else ""
        return f"{role}engine {number}"


def rerun(run_dir: Path, *, trust: bool = False) -> Rerun:
    """Simulate a stored run once more, and return it with a record of all its events.

    Args:
        run_dir: the directory of the run.
        trust: True allows the run to name classes and functions outside hicache.

    Raises:
        FileNotFoundError: the directory holds no run.
        ValueError: the stored run moved real data instead of simulating, this version does not know
            its settings, or it names code and is not trusted.
    """
    config = stored_config(run_dir / CONFIG_FILE)
    named = [f"{knob}={name}" for knob, name in provenance.own_classes(config).items()]
    if named and not trust:
        raise ValueError(
            f"{run_dir} names code to run, {' and '.join(named)}: if you trust it, add --trust "
            "(from Python trust=True)"
        )
    if config.executor.kind != "simulated":
        raise ValueError(
            f"only simulated runs can be explained, and {run_dir} has "
            f"executor.kind={config.executor.kind}"
        )
    timeline = Timeline()
    # single steps give the same result, and show every step
    watched = replace(config, engine=replace(config.engine, jump=False, explain=True))
    # relative paths of the settings start where the run was started
    started_in = Path(provenance.read_provenance(run_dir).get("directory", ""))
    with TemporaryDirectory(prefix="hicache-explain-") as scratch:
        placed = _placed(watched, started_in if started_in.is_dir() else Path(), scratch)
        result = experiment.run(placed, timeline=timeline)
    summary = summarize(result.records, result.measures)
    stored = read_summary(run_dir)
    return Rerun(
        config=config,
        records={record.id: record for record in result.records},
        summary=summary,
        timeline=timeline,
        differences=tuple(
            key
            for key in stored
            if stored[key] != summary.get(key)
            if key.partition("/")[0] not in ASKED  # the run may not have recorded these keys
        ),
    )


def _placed(config: ExperimentConfig, started_in: Path, scratch: str) -> ExperimentConfig:
    # a simulated run gives the same result on every engine, so it needs neither the directory nor
    # the server that the stored run used
    storage, workload = config.storage, config.workload
    if storage.kind in ("slab", "file"):
        storage = replace(storage, root=scratch)
    elif storage.kind in ("redis", "mooncake"):
        storage = replace(storage, kind="memory", root=None, capacity_gib=None)
    if isinstance(workload, TraceConfig):
        tokenizer = workload.tokenizer
        if tokenizer is not None and (started_in / tokenizer).exists():
            tokenizer = str(started_in / tokenizer)
        path = None if workload.path is None else str(started_in / workload.path)
        workload = replace(workload, path=path, tokenizer=tokenizer)
    data_dir = None if config.data_dir is None else str(started_in / config.data_dir)
    return replace(config, workload=workload, storage=storage, data_dir=data_dir)
