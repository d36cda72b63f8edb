"""The command line that all studies share."""

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from hicache.cli.command import in_one_sentence
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig


def run_study(experiment: str, study: Callable[[ExperimentConfig, Path], None]) -> None:
    """Run a study on `experiment=` with the overrides that the user typed.

    The study writes its files to a new directory below `outputs/`, whose path is printed last.
    """
    with in_one_sentence():
        config = config_of(f"experiment={experiment}", *sys.argv[1:])
        out_dir = Path("outputs", config.name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
        out_dir.mkdir(parents=True)
        study(config, out_dir)
    print(out_dir)
