"""One run, from its settings to its files: what the command line, Python and sweeps have in common.

The last file written is `summary.json`. A run is finished if this file exists and `error.txt` does
not. A finished run is repeated only if its code, trace, policy class or package versions have
changed. If the disk is full at the end of a run, its results are shown before the error.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hicache.config import ExperimentConfig, WandbMode
from hicache.results.metrics import Progress, RequestRecord, Result, summarize
from hicache.results.requests_file import FILES, write_requests
from hicache.results.tracking import Tracker, plain, write_json
from hicache.runs import goodput, provenance
from hicache.runs.checks import as_yaml, changes, refuse_other, refuse_unknown, unheeded
from hicache.runs.errors import missing
from hicache.runs.stored import (
    CONFIG_FILE,
    ERROR_FILE,
    SUMMARY_FILE,
    flat,
    is_finished,
    read_rows,
    read_summary,
)

ATTACHED = (*FILES, "report.html", provenance.FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    out_dir: Path
    config: ExperimentConfig
    summary: dict[str, float | int]
    timing: dict[str, float]
    notes: tuple[str, ...]


Show = Callable[[Outcome], object]
Bar = Callable[[str], AbstractContextManager[Callable[[Progress], object]]]


def _nothing(_: object) -> None: ...


def run_job(
    config: ExperimentConfig,
    out_dir: Path,
    overrides: Sequence[str] = (),
    *,
    is_job: bool = False,
    bar: Bar | None = None,
    show: Show = _nothing,
) -> Mapping[str, float]:
    """Run an experiment, unless `out_dir` holds its results already, and return its metrics.

    Stored results count only if the code and the input files have not changed since.

    Args:
        config: the settings of the experiment.
        out_dir: the directory for the result files.
        overrides: those of the settings that the user has typed. A sentence on stderr names each
            one that has no effect.
        is_job: True if the run belongs to a sweep, which shows its results and progress itself.
            Its page is made on demand (`hicache report`).
        bar: makes a progress bar with a given title.
        show: called with the results at the end, even if some files could not be written.

    Raises:
        ValueError: a setting is wrong, `out_dir` holds another run, no request was measured, or
            memory ran out.
        OSError: a result file cannot be written.
    """
    refuse_unknown(config.metrics)
    for note in unheeded(config, overrides):
        if not is_job:
            sys.stderr.write(f"{note}\n")
    refuse_other(config, out_dir)
    settings = out_dir.name.partition("_")[2] or out_dir.name  # of a job: eviction=lru,seed=0
    if is_finished(out_dir):
        changed = changes(config, out_dir)
        if not changed:
            if not is_job:
                sys.stderr.write("already finished, and nothing has changed since\n")
            return read_summary(out_dir)
        title = settings if is_job else config.name
        sys.stderr.write(f"{title}: runs again, because of changes in {', '.join(changed)}\n")
    begin(config, out_dir)
    mode = config.tracker.wandb_mode
    if mode is WandbMode.sweeps:
        mode = WandbMode.offline if is_job else WandbMode.disabled
    tracker = Tracker(
        out_dir,
        replace(config.tracker, wandb_mode=mode),
        config=plain(config) | {"choices": _choices_of(config)},
        group=f"{config.name}/{out_dir.parent.name}" if is_job else config.name,
        **_names_of(config, out_dir.name, settings.split(",") if is_job else []),
    )
    with tracker, nullcontext(_nothing) if bar is None else bar(config.name) as show_progress:
        outcome = _finished(config, out_dir, tracker, show_progress, show, draws=not is_job)
    show(outcome)
    return outcome.summary


def _choices_of(config: ExperimentConfig) -> dict[str, str]:
    # what each group is, on one line of a panel
    groups = {"model": config.model.name, "hardware": config.hardware.name}
    kinds = {key: getattr(config, key).kind for key in ("workload", "storage", "executor")}
    return {**groups, **kinds, "policy": config.cache.policy}


def _names_of(config: ExperimentConfig, run: str, settings: Sequence[str]) -> dict[str, Any]:
    # W&B lists runs by name: what is compared comes first, and what repeats it last
    repeats = [each for each in settings if each.partition("=")[0] in ("seed", "slice")]
    arm = [each for each in settings if each not in repeats]
    tags = [config.model.name, config.workload.kind, *settings]
    job_type = " ".join(arm) or None
    return {
        "name": " ".join([*arm, *repeats]) or f"{config.name}/{run}",
        "job_type": job_type,
        "tags": tags,
    }


def _finished(
    config: ExperimentConfig,
    out_dir: Path,
    tracker: Tracker,
    show_progress: Callable[[Progress], object],
    show: Show,
    *,
    draws: bool,
) -> Outcome:
    # run the experiment, and write its files
    def on_progress(progress: Progress) -> None:
        if progress.row is not None:
            tracker.log(progress.row)
        show_progress(progress)

    started, loaded = time.perf_counter(), set(sys.modules)
    try:
        result = _run(config, on_progress)
    finally:
        _forget_modules(config, loaded)
    outcome = Outcome(
        out_dir=out_dir,
        config=config,
        summary=summarize(result.records, result.measures),
        timing={
            "wall_s": result.wall_s,
            "requests_per_wall_s": len(result.records) / max(result.wall_s, 1e-9),
        },
        notes=tuple(result.notes),
    )
    try:
        write_requests(out_dir, result.records)
        if draws:
            _draw(outcome, result.records, title=tracker.name)
        tracker.attach([path for file in ATTACHED if (path := out_dir / file).is_file()])
        outcome.timing["total_wall_s"] = time.perf_counter() - started
        write_json(out_dir / "timing.json", outcome.timing)
        tracker.summarize(outcome.summary)
    except OSError:
        outcome.timing["total_wall_s"] = time.perf_counter() - started
        with suppress(OSError):
            show(outcome)
        raise
    return outcome


def _draw(outcome: Outcome, records: Sequence[RequestRecord], title: str) -> None:
    if find_spec("jinja2") is None:
        sys.stderr.write(f"no report.html: {missing('jinja2')}\n")
        return
    from hicache.results import report

    report.write_report(
        outcome.out_dir,
        title=title,
        summary=outcome.summary,
        rows=read_rows(outcome.out_dir),
        knobs=flat(plain(outcome.config)),
        records=records,
    )


def _run(config: ExperimentConfig, on_progress: Callable[[Progress], None]) -> Result:
    try:
        result = goodput.run(config, progress=on_progress)
    except MemoryError as error:
        raise ValueError(
            f"out of memory: lower cache.host_gib ({config.cache.host_gib}) or cache.device_gib "
            f"({config.cache.device_gib}), or use a smaller workload"
        ) from error
    if not result.records:
        raise ValueError(
            f"no request arrives after the warm-up: workload.warm_up_s="
            f"{config.workload.warm_up_s} must be shorter than the workload"
        )
    return result


def _forget_modules(config: ExperimentConfig, loaded: set[str]) -> None:
    # A policy module may hold state. The next job in this process must not see it, so the user's
    # policy modules and those in the same folders are imported again.
    names = {name.partition(":")[0] for name in provenance.own_classes(config).values()}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names - loaded]
    folders = {Path(file).parent for file in files if file}
    for name in set(sys.modules) - loaded:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent in folders:
            del sys.modules[name]


def begin(config: ExperimentConfig, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    for file in (SUMMARY_FILE, ERROR_FILE):
        (out_dir / file).unlink(missing_ok=True)
    (out_dir / CONFIG_FILE).write_text(as_yaml(config))
    provenance.write_provenance(config, out_dir)
