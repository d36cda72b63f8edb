"""Run one experiment, or a sweep of them.

python -m experiments.run                                     the built-in workload
python -m experiments.run workload=mooncake_conversation storage=slab prefetch.stop=best_effort
python -m experiments.run -m cache.host_gib=64,128,256 seed=0,1,2
python -m experiments.run experiment=prefetch_stop            a question, with its own grid

What a run leaves is in its directory, whose path is the last line printed.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments import schema
from experiments.job import CONFIG_ERRORS, explain, run_job
from experiments.progress import ProgressBar
from experiments.screen import show_line, show_run
from hicache import experiment

CONF = Path(__file__).resolve().parents[1] / "conf"

# what else than a replay `program` may name: each writes into the run's directory
PROGRAMS = {"capacity": "experiments.capacity", "sim_vs_real": "experiments.sim_vs_real"}

INTERRUPTED = 130  # exit code of a process that Ctrl-C ended: 128 + 2

schema.register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose_and_run(cfg: DictConfig) -> int:
    """Run one job; of a sweep, return the exit code so that the other jobs still run."""
    hydra_config = HydraConfig.get()
    out_dir = Path(hydra_config.runtime.output_dir)
    is_sweep = hydra_config.mode is RunMode.MULTIRUN
    name = f"{cfg.name}/{out_dir.relative_to(out_dir.parents[int(is_sweep)])}"
    try:
        if cfg.program != "replay":
            carry_out(cfg, out_dir)
            print(out_dir)
            return 0
        is_alone = not str(hydra_config.launcher._target_).endswith("JoblibLauncher")
        bar = ProgressBar(name, bar=is_alone or not is_sweep, line=not is_sweep)
        outcome = run_job(experiment.run, cfg, out_dir, group=cfg.name, name=name, bar=bar)
    except Exception as error:  # whatever it was, the other jobs of the sweep are not to blame
        code = explain(error, out_dir)
        if is_sweep:
            return code
        sys.exit(code)
    if is_sweep:
        show_line(outcome, f"{hydra_config.job.num}: {swept(hydra_config.overrides.task, out_dir)}")
    else:
        show_run(outcome)
        print(out_dir)
        if outcome.summary.get("verify/unequal_count"):
            sys.exit(3)  # the cache has given a model wrong bytes
    return 0


def swept(overrides: Sequence[str], out_dir: Path) -> str:
    """What this job of a sweep was told and not every other one as well."""
    sweep = OmegaConf.load(out_dir.parent / "multirun.yaml")
    typed = OmegaConf.select(sweep, "hydra.overrides.task")
    # Hydra escapes the colon of module:Class
    told = [re.sub(r"\\(.)", r"\1", override) for override in overrides]
    return " ".join([item for item in told if item not in typed] or told)


def carry_out(cfg: DictConfig, out_dir: Path) -> None:
    """Do what `program` names."""
    config = schema.to_config(cfg)
    module = PROGRAMS.get(config.program)
    if module is None:
        raise ValueError(
            f"program must be replay or one of {', '.join(PROGRAMS)}, got {config.program!r}"
        )
    importlib.import_module(module).carry_out(config, out_dir)  # a simulation needs no torch


def main() -> None:
    """Run, with what Hydra finds wrong put in one sentence too."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of being printed
    try:
        compose_and_run()
    except CONFIG_ERRORS as error:
        sys.exit(explain(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
