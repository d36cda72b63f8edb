"""What a directory already holds: finished runs are neither made twice nor mixed with others.

A run is finished once `summary.json` is there, the last file that it writes, and no `error.txt`. It
is made again if what it was made of has changed: code, trace, a class of the user's own, versions.
Hydra writes into the directories of runs before it calls us, so that those that are used are looked
at before that, in a callback.
"""

import copy
import difflib
import fcntl
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hicache.cli.command import in_one_sentence
from hicache.cli.job import CONFIG_FILE, as_yaml, is_finished
from hicache.cli.schema import refuse_written_password, to_config
from hicache.cli.stored import read_json, read_yaml
from hicache.cli.sweep import sum_up
from hicache.cli.tables import provenance
from hicache.cli.tables.console import console
from hicache.cli.tables.groups import flat, job_order, load_run
from hicache.config import ExperimentConfig, check_name
from hicache.results.keys import KNOWN
from hicache.results.tracking import plain
from hicache.results.verdict import STAGE

_LOCKED: dict[Path, int] = {}  # open directories, which this process has locked


class UsedDirectories(Callback):
    """Refuses a directory that cannot be made, or in which something else has been run."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the directory of a single run."""
        with in_one_sentence():
            check_name(config.name)
            refuse_written_password(config)
            directory = _made("hydra.run.dir", config.hydra.run.dir)
            _lock(directory)
            if is_finished(directory):
                refuse_other(to_config(_without_hydra(config)), directory)
        # so that an error message can name the run's directory
        HydraConfig.instance().set_config(copy.deepcopy(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the directories of all jobs of a sweep."""
        with in_one_sentence():
            check_name(config.name)
            refuse_written_password(config)
            refuse_unknown(config.metrics)  # in one sentence, not in one a job
            directory = _made("hydra.sweep.dir", config.hydra.sweep.dir)
            _lock(directory)
            if is_finished(directory):
                raise ValueError(
                    f"{directory} contains a finished run: choose another for the sweep"
                )
            _look_at_jobs(config, directory)
        # so that an interrupted sweep can be summed up
        HydraConfig.instance().set_config(copy.deepcopy(config))


def refuse_other(config: ExperimentConfig, directory: Path) -> None:
    """Leave alone what another configuration has made.

    Raises:
        ValueError: there is a finished run of another configuration.
    """
    if not is_finished(directory):
        return
    stored = directory / CONFIG_FILE
    text = stored.read_text() if stored.is_file() else ""
    if text != as_yaml(config):
        raise ValueError(
            f"{directory} contains a finished run with another configuration"
            f"{_difference(stored, config)}: choose another directory, or remove this one"
        )


def refuse_unknown(metrics: Iterable[str]) -> None:
    """Say so before a run and not after it.

    Raises:
        ValueError: no summary has such a metric.
    """
    for metric in metrics:
        if re.sub(f"^{STAGE}\\d+/", "", metric) not in KNOWN:
            near = difflib.get_close_matches(metric, KNOWN, n=3)
            told = f"did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists them"
            raise ValueError(f"metrics: unknown metric {metric} ({told})")


def changes(config: ExperimentConfig, directory: Path) -> list[str]:
    """What the finished run in the directory would be made of otherwise today."""
    made_of = directory / provenance.FILE
    then = read_json(made_of) if made_of.is_file() else {}
    return provenance.changed_since(then, config)


def jobs_of(config: DictConfig) -> list[list[str]] | None:
    """What each job of a sweep is told, as Hydra's own sweeper has it; None: it is another one."""
    sweeper = config.hydra.sweeper
    if not str(sweeper._target_).endswith("BasicSweeper"):
        return None
    told = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    hydra = GlobalHydra.instance()  # gone once the program is on its way out
    loader = hydra.config_loader() if hydra.is_initialized() else None
    parser = OverridesParser.create(config_loader=loader)
    overrides = parser.parse_overrides([*told, *config.hydra.overrides.task])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return jobs


@cache
def sweep_config(directory: Path) -> DictConfig:
    """What Hydra has written down of a sweep, once, before its jobs."""
    return read_yaml(directory / "multirun.yaml", DictConfig)


def sum_up_interrupted(why: str) -> None:
    """Say why a sweep stopped and what it has left, with its table and, last, its directory."""
    if not sweep_has_begun():
        sys.stderr.write(f"{why}\n")
        return
    hydra_config = HydraConfig.get()
    directory = Path(hydra_config.sweep.dir).absolute()
    jobs = sorted((path for path in directory.iterdir() if path.name.isdigit()), key=job_order)
    finished = [path for path in jobs if is_finished(path)]
    if finished:
        name = str(read_yaml(finished[0] / CONFIG_FILE, DictConfig).name)
        sum_up(directory, [load_run(path) for path in finished], title=name)
    told = jobs_of(sweep_config(directory))
    of_all = "" if told is None else f" of {len(told)}"
    sys.stderr.write(
        f"{why}: {len(finished)}{of_all} jobs are finished; to continue, repeat the command "
        f"with hydra.sweep.dir={os.path.relpath(directory)}\n"
    )
    console().print(str(directory), soft_wrap=True)


def sweep_has_begun() -> bool:
    """Whether a sweep has begun."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def _look_at_jobs(config: DictConfig, directory: Path) -> None:
    used = {path.name for path in directory.iterdir() if path.is_dir()}
    jobs = jobs_of(config) if used else None
    if jobs is None:
        return
    loader = GlobalHydra.instance().config_loader()
    for number, overrides in enumerate(jobs):
        job = loader.load_sweep_config(config, list(overrides))
        with read_write(job.hydra), open_dict(job.hydra):
            job.hydra.job.num = job.hydra.job.id = number
        path = directory / str(job.hydra.sweep.subdir)
        if is_finished(path):
            refuse_other(to_config(_without_hydra(job)), path)
    others = sorted(int(name) for name in used if name.isdigit() and int(name) >= len(jobs))
    if others:
        raise ValueError(
            f"{directory} contains job {others[0]} of another sweep, and this sweep has only "
            f"{len(jobs)} jobs: choose another directory, or remove this one"
        )


def _made(knob: str, name: str) -> Path:
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{knob}={name}: cannot create the directory: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{knob}={name}: the directory is not writable")
    return path


def _lock(directory: Path) -> None:
    """Keep other processes from running in the directory for as long as this one lives.

    Raises:
        ValueError: another process runs in it.
    """
    if directory.resolve() in _LOCKED:
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"another run is writing to {directory}: wait for its end, or name another directory"
        ) from error
    except OSError:  # some network file systems lock no directory
        os.close(descriptor)
        sys.stderr.write(f"{directory} cannot be locked: start no second run in it\n")
        return
    _LOCKED[directory.resolve()] = descriptor


def _without_hydra(config: DictConfig) -> DictConfig:
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    return job


def _difference(file: Path, config: ExperimentConfig) -> str:
    if not file.is_file():
        return ""
    stored, wanted = read_yaml(file, DictConfig), OmegaConf.create(plain(config))
    then, now = (flat(OmegaConf.to_container(text)) for text in (stored, wanted))
    keys = [key for key in dict.fromkeys([*then, *now]) if then.get(key) != now.get(key)]
    shown = [f"{key} was {then.get(key)} and is {now.get(key)}" for key in keys[:2]]
    more = [f"{len(keys) - 2} more"] if len(keys) > 2 else []
    return f" ({', '.join(shown + more)})"
