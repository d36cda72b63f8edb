"""The jobs of a sweep, for Hydra's launchers: each choice of files is composed once.

Hydra composes every job twice, which costs more than a short simulation. Here a job whose overrides
set values gets a copy of the composed files, in which these values are set.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from hicache.runs.grid import choices_of_sweep, jobs_of
from hicache.runs.schema import CONF, is_value

# of this process: the composed files as bytes, by the sweep and its choice of files
_COMPOSED: dict[tuple[str, ...], bytes] = {}


class Composed(DictConfig):
    """Settings that Hydra copies for each job; as bytes this takes a third of the time."""

    def __deepcopy__(self, memo: object) -> "Composed":
        copied: Composed = pickle.loads(pickle.dumps(self))
        return copied


@dataclass
class OnceLoader:
    """The part of Hydra's loader that launchers use; a worker process has its own."""

    inner: ConfigLoader

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        told = OverridesParser.create().parse_overrides(sweep_overrides)
        values = [each for each in told if is_value(each)]
        files = [str(each.input_line) for each in told if each not in values]
        key = (str(master_config.hydra.sweep.dir), *files)
        if key not in _COMPOSED:
            composed = self.inner.load_sweep_config(master_config, files)
            with flag_override(composed, ["readonly", "struct"], False):  # noqa: FBT003
                for plugin in ("launcher", "sweeper"):  # their classes cannot be pickled
                    composed.hydra[plugin] = OmegaConf.to_container(composed.hydra[plugin])
            _COMPOSED[key] = pickle.dumps(composed)
        config: DictConfig = pickle.loads(_COMPOSED[key])
        object.__setattr__(config, "__class__", Composed)  # not a setting
        try:
            for each in values:
                OmegaConf.update(config, each.key_or_group, each.value())
        except OmegaConfBaseException:  # Hydra's own error names the override
            return self.inner.load_sweep_config(master_config, sweep_overrides)
        with flag_override(config, ["readonly", "struct"], False):  # noqa: FBT003
            config.hydra.overrides.task = list(sweep_overrides)
            config.hydra.job.override_dirname = ",".join(sorted(sweep_overrides))
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config


class GridSweeper(Sweeper):
    """Runs every combination of the values of a grid, in batches of `max_batch_size` jobs."""

    def __init__(self, max_batch_size: int | None = None, params: Any = None) -> None:
        self._batch_size = max_batch_size

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._loader = OnceLoader(hydra_context.config_loader)
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(cast(ConfigLoader, self._loader), hydra_context.callbacks),
            task_function=task_function,
            config=config,
        )

    def sweep(self, arguments: list[str]) -> Sequence[Any]:
        config, launcher = self.config, self.launcher
        assert config is not None
        assert launcher is not None
        jobs = jobs_of(choices_of_sweep(config.hydra))
        directory = Path(config.hydra.sweep.dir)
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, directory / "multirun.yaml")
        for job in first_of_each_value(jobs):  # a wrong value is told before the first job starts
            self._loader.load_sweep_config(config, job)
        size = self._batch_size or len(jobs)
        returned: list[Any] = []
        for first in range(0, len(jobs), size):
            batch = launcher.launch(jobs[first : first + size], initial_job_idx=first)
            returned += [each.return_value for each in batch]
        return returned


def first_of_each_value(jobs: Sequence[list[str]]) -> Iterator[list[str]]:
    """Yield each job with a value that no earlier job with the same choice of files has."""
    seen: set[tuple[frozenset[str], str]] = set()
    for job in jobs:
        files = frozenset(each for each in job if (CONF / each.partition("=")[0]).is_dir())
        new = {(files, each) for each in job} - seen
        if new:
            yield job
        seen |= new
