"""Continues interrupted sweeps: keeps finished runs, and refuses directories of other runs.

A run is finished if `summary.json`, its last file, exists and `error.txt` does not. It is repeated
if its code, trace, policy class or package versions have changed. Hydra writes into run directories
before it calls our code, so a callback checks them earlier.
"""

import copy
import difflib
import fcntl
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hicache.cli.command import in_one_sentence
from hicache.cli.grid import choices_of_sweep, find_jobs, jobs_of, read_choices
from hicache.cli.job import as_yaml
from hicache.cli.schema import to_config
from hicache.cli.stored import CONFIG_FILE, flat, is_finished, read_yaml
from hicache.cli.tables import provenance
from hicache.config import ExperimentConfig, check_name
from hicache.results.keys import KNOWN
from hicache.results.tracking import plain
from hicache.results.verdict import STAGE
from hicache.secret import refuse_secrets


class UsedDirectories(Callback):
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with in_one_sentence():
            _check(config)
            directory = _made("hydra.run.dir", config.hydra.run.dir)
            lock(directory)  # until the process ends
            if is_finished(directory):
                job = copy.deepcopy(config)
                with read_write(job), open_dict(job):
                    del job["hydra"]
                refuse_other(to_config(job), directory)
        # lets an error message name the run's directory
        HydraConfig.instance().set_config(copy.deepcopy(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with in_one_sentence():
            _check(config)
            refuse_unknown(config.metrics)  # report once here, not once per job
            directory = _made("hydra.sweep.dir", config.hydra.sweep.dir)
            lock(directory)  # until the process ends
            if is_finished(directory):
                raise ValueError(
                    f"{directory} contains a finished run: choose another for the sweep"
                )
            _refuse_other_sweep(config, directory)


def refuse_other(config: ExperimentConfig, directory: Path) -> None:
    """Raise an error if the directory holds a finished run whose settings differ from `config`.

    Raises:
        ValueError: the directory holds such a run.
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
    for metric in metrics:
        if re.sub(f"^{STAGE}\\d+/", "", metric) not in KNOWN:
            near = difflib.get_close_matches(metric, KNOWN, n=3)
            told = f"did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists them"
            raise ValueError(f"metrics: unknown metric {metric} ({told})")


def changes(config: ExperimentConfig, directory: Path) -> list[str]:
    return provenance.changed_since(provenance.read_provenance(directory), config)


class BusyError(ValueError):
    pass


def lock(directory: Path) -> int | None:
    """Lock a directory, so that no other process starts a run in it.

    Return an open file descriptor; to unlock the directory, close the descriptor. Return None if
    the file system cannot lock directories.

    Raises:
        BusyError: another process has locked the directory.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BusyError(
            f"another run is writing to {directory}: wait for its end, or name another directory"
        ) from error
    except OSError:  # some network file systems cannot lock a directory
        os.close(descriptor)
        sys.stderr.write(f"{directory} cannot be locked: start no second run in it\n")
        return None
    return descriptor


def _refuse_other_sweep(config: DictConfig, directory: Path) -> None:
    begun = find_jobs(directory)
    if not begun:
        return
    then, now = jobs_of(read_choices(directory)), jobs_of(choices_of_sweep(config.hydra))
    for number, path in begun.items():
        if number >= len(now):
            told = f"and this sweep has only {len(now)} jobs"
        elif number >= len(then) or then[number] != now[number]:
            was = " ".join(then[number]) if number < len(then) else "not in its multirun.yaml"
            told = f"which was {was} and would be {' '.join(now[number])}"
        else:
            continue
        raise ValueError(
            f"{directory} contains job {path.name} of another sweep, {told}: choose another "
            "directory, or remove this one"
        )


def _check(config: DictConfig) -> None:
    check_name(config.name)
    # Hydra would write it down
    told: Any = OmegaConf.to_container(config, resolve=False)
    refuse_secrets(told["hydra"]["sweeper"]["params"] or {})
    refuse_secrets({key: value for key, value in told.items() if key != "hydra"})


def _made(knob: str, name: str) -> Path:
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{knob}={name}: cannot create the directory: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{knob}={name}: the directory is not writable")
    return path


def _difference(file: Path, config: ExperimentConfig) -> str:
    if not file.is_file():
        return ""
    then, now = flat(read_yaml(file, dict)), flat(plain(config))
    keys = [key for key in dict.fromkeys([*then, *now]) if then.get(key) != now.get(key)]
    shown = [f"{key} was {then.get(key)} and is {now.get(key)}" for key in keys[:2]]
    more = [f"{len(keys) - 2} more"] if len(keys) > 2 else []
    return f" ({', '.join(shown + more)})"
