"""One run, from a composed config to its files; the last file written is `summary.json`.

An error ends the run with one sentence on stderr and in `error.txt` of the run directory. A fault
of the user's own class adds the frames of that class, and a fault of ours a traceback, as does
`HICACHE_TRACEBACK=1`. A full disk ends it in the same way, but the results of a
run that reached its end are printed first.
"""

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hicache.cli.errors import EXTRAS, missing, sentence
from hicache.cli.progress import progress_bar
from hicache.cli.stored import CONFIG_FILE, ERROR_FILE, SUMMARY_FILE
from hicache.cli.tables import provenance
from hicache.config import ExperimentConfig
from hicache.results.metrics import Progress, RequestRecord, Result, summarize
from hicache.results.requests_file import FILES, write_requests
from hicache.results.tracking import Tracker, plain, write_json
from hicache.secret import masked
from hicache.storage.base import StorageError
from hicache.user_code import UserCodeError, told

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)
ATTACHED = (*FILES, "tokens.png", "ttft.png", "report.html", provenance.FILE)
BAD_INPUT = (ValueError, OSError, StorageError, *CONFIG_ERRORS)
REPORT = "a fault of hicache; please report it with these lines and those of `hicache env`"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


Run = Callable[..., Result]  # executes an experiment: `hicache.experiment.run`


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    out_dir: Path
    config: ExperimentConfig
    summary: dict[str, float | int]
    timing: dict[str, float]
    notes: tuple[str, ...]


def run_job(
    run: Run,
    config: ExperimentConfig,
    out_dir: Path,
    *,
    group: str,
    name: str,
    tags: Sequence[str] = (),
    is_job: bool = False,
    show: Callable[[Outcome], object] = lambda _: None,
) -> Outcome:
    """Execute one experiment and write its result files into `out_dir`.

    Args:
        run: the function that executes an experiment.
        config: the settings of the experiment.
        out_dir: the directory for the result files.
        group, name, tags: labels of the experiment in Weights & Biases (W&B).
        is_job: True if the run belongs to a sweep, which has a progress bar of its own.
        show: called with the results at the end, even if some files could not be written.

    Raises:
        ValueError: no request was measured, or memory ran out.
        OSError: a result file cannot be written.
    """
    started = time.perf_counter()
    loaded = set(sys.modules)
    begin(config, out_dir)
    tracker = Tracker(
        out_dir, config.tracker, config=plain(config), group=group, name=name, tags=tags
    )
    with tracker:
        with progress_bar(config.name, is_shown=not is_job) as show_progress:

            def on_progress(progress: Progress) -> None:
                if progress.row is not None:
                    tracker.log(progress.row)
                show_progress(progress)

            try:
                result = _run(run, config, on_progress)
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
            _write_records(outcome, result.records, title=name)
            tracker.attach([path for file in ATTACHED if (path := out_dir / file).is_file()])
            outcome.timing["total_wall_s"] = time.perf_counter() - started
            write_json(out_dir / "timing.json", outcome.timing)
            tracker.summarize(outcome.summary)
        except OSError:
            outcome.timing["total_wall_s"] = time.perf_counter() - started
            with suppress(OSError):
                show(outcome)
            raise
    show(outcome)
    return outcome


def _write_records(outcome: Outcome, records: Sequence[RequestRecord], title: str) -> None:
    write_requests(outcome.out_dir, records)
    if find_spec("matplotlib") is None:
        sys.stderr.write(f"no figures and no report.html: {missing('matplotlib')}\n")
        return
    from hicache.results import report  # matplotlib takes a second to import

    report.write_report(
        outcome.out_dir,
        title=title,
        summary=outcome.summary,
        config=outcome.config,
        records=records,
    )


def _run(run: Run, config: ExperimentConfig, on_progress: Callable[[Progress], None]) -> Result:
    try:
        result = run(config, progress=on_progress)
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


def as_yaml(config: ExperimentConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def report_error(error: BaseException, out_dir: Path | None = None) -> int:
    """Print an error to stderr, write it to `error.txt` in `out_dir`, and return the exit code.

    The first line names the fault. The frames of the user's own code follow if that code failed,
    and a traceback follows if the program has a bug. The exit code is 2 if the user's input is
    wrong, and 1 otherwise. None as `out_dir` means that no file is written.
    """
    is_input = isinstance(error, BAD_INPUT) or _missing_package(error) is not None
    lines = [one_sentence(error, out_dir)]
    if isinstance(error, UserCodeError):
        lines.append(error.own_frames())
    elif not is_input:
        lines[0] = f"{told(error)}: {REPORT}"
    if os.environ.get("HICACHE_TRACEBACK") == "1" or lines[0].endswith(REPORT):
        lines.append("".join(traceback.format_exception(error)).rstrip())
    text = masked("\n".join(filter(None, lines))) + "\n"
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
    if out_dir is not None and out_dir.is_dir():
        file = out_dir / ERROR_FILE
        try:
            file.write_text(text)
        except OSError:  # a truncated sentence would mislead
            file.unlink(missing_ok=True)
    return 2 if is_input else 1


def _missing_package(error: BaseException) -> str | None:
    # the optional package whose import failed; None for other errors
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name if name in EXTRAS else None


def one_sentence(error: BaseException, out_dir: Path | None = None) -> str:
    package = _missing_package(error)
    if package is not None:
        return missing(package)
    if isinstance(error, CONFIG_ERRORS):
        return sentence(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = error.filename or out_dir or "the output of this command"
        return (
            f"{os.strerror(error.errno)}: cannot write to {where}; files written before are kept, "
            f"and the same command continues once there is space"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__
