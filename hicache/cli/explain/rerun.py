"""Repeats a stored run with all events recorded.

A simulated run depends only on its configuration, so the stored run needs no event log.
"""

from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path

from hicache import experiment
from hicache.cli.schema import stored_config
from hicache.cli.stored import CONFIG_FILE, SUMMARY_FILE, read_json
from hicache.cli.tables import provenance
from hicache.config import ExperimentConfig
from hicache.observe.timeline import Timeline
from hicache.results.metrics import RequestRecord, summarize

ASKED = ("computed", "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    config: ExperimentConfig
    records: dict[int, RequestRecord]
    summary: dict[str, float | int]
    timeline: Timeline
    differences: tuple[str, ...]


def rerun(run_dir: Path) -> Rerun:
    """Simulate a stored run once more, and return it with a record of all its events.

    Raises:
        FileNotFoundError: the directory holds no run.
        ValueError: the stored run moved real data instead of simulating, or this version does not
            know its settings.
    """
    config = stored_config(run_dir / CONFIG_FILE)
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
    with chdir(started_in if started_in.is_dir() else "."):
        result = experiment.run(watched, timeline=timeline)
    summary = summarize(result.records, result.measures)
    stored = read_json(run_dir / SUMMARY_FILE)
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
