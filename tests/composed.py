"""Configs as the command line composes them, each of them once: composing takes a good while."""

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir

from experiments import schema
from hicache.config import ExperimentConfig

CONF = Path(__file__).resolve().parents[1] / "conf"


@cache
def composed(*overrides: str) -> ExperimentConfig:
    """What `python -m experiments.run OVERRIDES` would run."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.to_config(compose("config", overrides=list(overrides)))


@cache
def register() -> None:
    """Tell Hydra the types of all groups, once."""
    schema.register()
