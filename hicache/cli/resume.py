"""Checks the directories of runs and sweeps before Hydra writes into them.

A finished run is kept, and a directory of another run or sweep is refused.
"""

import copy
import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hicache.cli.command import in_one_sentence
from hicache.config import check_name
from hicache.runs.checks import lock, refuse_other, refuse_unknown
from hicache.runs.grid import choices_of_sweep, find_jobs, jobs_of, read_choices
from hicache.runs.schema import to_config
from hicache.runs.stored import is_finished
from hicache.secret import refuse_secrets


class UsedDirectories(Callback):
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        settings = copy.deepcopy(config)
        with read_write(settings), open_dict(settings):
            del settings["hydra"]
        claim(settings, config.hydra.run.dir)
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


def claim(settings: DictConfig, run_dir: str) -> None:
    """Create and lock the directory of a single run.

    If it cannot be used, or holds a finished run with other settings, print why, and exit.
    """
    with in_one_sentence():
        _check(settings)
        directory = _made("hydra.run.dir", run_dir)
        lock(directory)  # until the process ends
        if is_finished(directory):
            refuse_other(to_config(settings), directory)


def _check(settings: DictConfig) -> None:
    check_name(settings.name)
    told: Any = OmegaConf.to_container(settings)
    # they would be written down; of Hydra's own settings, those of a sweep
    grid = told.pop("hydra", {"sweeper": {}})["sweeper"].get("params")
    refuse_secrets({**told, **(grid or {})})


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


def _made(knob: str, name: str) -> Path:
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{knob}={name}: cannot create the directory: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{knob}={name}: the directory is not writable")
    return path
