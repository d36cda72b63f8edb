"""One run, from a composed config to the files it leaves behind.

A bad input ends in one sentence: on stderr, in `error.txt` of the run directory, and nowhere a
traceback, unless `HICACHE_TRACEBACK=1` asks for one.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.complaint import sentence
from experiments.progress import ProgressBar
from experiments.schema import to_config
from hicache.config import ExperimentConfig
from hicache.metrics import Progress, Result, summarize
from hicache.storage.base import StorageError
from hicache.tracking import Tracker, plain, write_json

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)
BAD_INPUT = (ValueError, OSError, StorageError, *CONFIG_ERRORS)


class Run(Protocol):
    """What carries out an experiment: `hicache.experiment.run`."""

    def __call__(
        self, config: ExperimentConfig, *, progress: Callable[[Progress], None] | None = None
    ) -> Result:
        """Build everything from the config and run it to the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that came to its end."""

    out_dir: Path
    config: ExperimentConfig
    summary: dict[str, float | int]
    timing: dict[str, float]
    notes: tuple[str, ...]


def run_job(
    run: Run, cfg: DictConfig, out_dir: Path, *, group: str, name: str, bar: ProgressBar
) -> Outcome:
    """Run `cfg` and write everything about it into `out_dir`."""
    config = to_config(cfg)
    out_dir.mkdir(parents=True, exist_ok=True)
    values = plain(config)
    (out_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    tracker = Tracker(out_dir, config.tracker, config=values, group=group, name=name)
    with tracker, bar:

        def on_progress(progress: Progress) -> None:
            if progress.row is not None:
                tracker.log(progress.row)
            bar.show(progress)

        started = time.perf_counter()
        result = run(config, progress=on_progress)
        summary = summarize(result.records, result.measures)
        timing = {
            "wall_s": result.wall_s,
            "requests_per_wall_s": len(result.records) / max(result.wall_s, 1e-9),
            "total_wall_s": time.perf_counter() - started,
        }
        write_json(out_dir / "timing.json", timing)
        tracker.summarize(summary)

    from hicache import report  # matplotlib and pyarrow take a second to import

    report.write_requests(out_dir / "requests.parquet", result.records)
    report.write_report(out_dir, title=name)
    return Outcome(
        out_dir=out_dir,
        config=config,
        summary=summary,
        timing=timing,
        notes=tuple(result.notes),
    )


def explain(error: Exception, out_dir: Path | None = None) -> int:
    """Tell the reader what went wrong, and return the exit code: 2 for bad input, 1 for a bug."""
    if os.environ.get("HICACHE_TRACEBACK") == "1" or not isinstance(error, BAD_INPUT):
        text = "".join(traceback.format_exception(error)).rstrip()
    else:
        text = one_sentence(error)
    sys.stderr.write(text + "\n")
    if out_dir is not None and out_dir.is_dir():
        (out_dir / "error.txt").write_text(text + "\n")
    return 2 if isinstance(error, BAD_INPUT) else 1


def one_sentence(error: Exception) -> str:
    """The message of an error, on one line."""
    if isinstance(error, CONFIG_ERRORS):
        return sentence(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__
