"""Run one experiment, or a sweep.

hicache run                                     replay the built-in workload
hicache run workload=mooncake_conversation storage=slab prefetch.stop=best_effort
hicache run -m cache.host_gib=64,128,256 seed=0,1,2
hicache run experiment=prefetch_stop            run a question with its grid
hicache run --help storage                      show the knobs of a group

A run writes its results to a directory, whose path is the last line printed. To continue an
interrupted sweep, repeat the command with `hydra.sweep.dir=` and the directory of the sweep.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hicache.cli import goodput, knobs, schema
from hicache.cli.command import in_one_sentence
from hicache.cli.job import (
    CONFIG_ERRORS,
    SUMMARY_FILE,
    Outcome,
    explain,
    is_finished,
    run_job,
)
from hicache.cli.progress import ProgressBar
from hicache.cli.resume import (
    changes,
    jobs_of,
    refuse_other,
    refuse_unknown,
    sum_up_interrupted,
    sweep_config,
    sweep_has_begun,
)
from hicache.cli.stored import read_json
from hicache.cli.terminal import show_line, show_run
from hicache.config import ExperimentConfig, inert_knobs

UNEQUAL = 3  # exit code of a run whose cache has given a model wrong bytes
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended: 128 + 2

schema.register()


@hydra.main(version_base="1.3", config_path=str(schema.CONF), config_name="config")
def compose_and_run(cfg: DictConfig) -> int:
    """Run one job; of a sweep, return the exit code so that the other jobs still run."""
    out_dir = Path(HydraConfig.get().runtime.output_dir)
    is_sweep = sweep_has_begun()
    try:
        summary = make(cfg, out_dir, is_sweep=is_sweep)
        code = UNEQUAL if summary.get("verify/unequal_count") and not is_sweep else 0
    except Exception as error:  # whatever it was, the other jobs of the sweep are not to blame
        # an error.txt would spoil a run that is there
        code = explain(error, None if is_finished(out_dir) else out_dir)
    if code and not is_sweep:
        sys.exit(code)
    return code


def make(cfg: DictConfig, out_dir: Path, *, is_sweep: bool) -> Mapping[str, float]:
    """Run one job, unless it is there already, and print what came of it; returns its summary."""
    hydra_config = HydraConfig.get()
    title = f"{job_title(out_dir)}: {' '.join(swept(out_dir))}" if is_sweep else str(cfg.name)
    config = schema.to_config(cfg)
    refuse_unknown(config.metrics)
    for note in unheeded(config, swept(out_dir) if is_sweep else hydra_config.overrides.task):
        sys.stderr.write(f"{note}\n")
    refuse_other(config, out_dir)
    if is_finished(out_dir):
        changed = changes(config, out_dir)
        if not changed:
            stored = read_json(out_dir / SUMMARY_FILE)
            told = "already finished, and nothing has changed since"
            print(f"{title}  →  {told}" if is_sweep else f"{told}\n{out_dir}")
            return stored
        sys.stderr.write(f"{title}: runs again, because of changes in {', '.join(changed)}\n")
    is_alone = str(hydra_config.launcher._target_).endswith("BasicLauncher")
    bar = ProgressBar(
        f"{config.name}, {job_title(out_dir)}" if is_sweep else config.name,
        bar=is_alone or not is_sweep,
        line=not is_sweep,
    )
    outcome = run_job(
        goodput.run,
        config,
        out_dir,
        group=f"{config.name}/{out_dir.parent.name}" if is_sweep else config.name,
        name=f"{config.name}/{out_dir.relative_to(out_dir.parents[int(is_sweep)])}",
        bar=bar,
        show=partial(show, title=title if is_sweep else None),
    )
    if not is_sweep:
        print(out_dir, flush=True)
    return outcome.summary


def show(outcome: Outcome, title: str | None) -> None:
    """Print what came of a run; on one line, after its title, if it is a job of a sweep."""
    if title is not None:
        show_line(outcome, title)
        return
    show_run(outcome)
    for metric in outcome.config.metrics:
        if metric not in outcome.summary:
            sys.stderr.write(f"this run has no metric {metric}\n")


def unheeded(config: ExperimentConfig, overrides: Sequence[str]) -> list[str]:
    """What was typed and changes nothing.

    Raises:
        ValueError: it names other data or another machine, and would be taken for that.
    """
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    needs = {key: where for key, where in inert_knobs(config).items() if key in typed}
    notes = [f"{key} has no effect: it is used only with {where}" for key, where in needs.items()]
    if "workload.path" in needs:
        raise ValueError(notes[list(needs).index("workload.path")])
    machine = [key for key in typed if key.startswith("hardware.")]
    if machine == ["hardware.name"] and "hardware" not in typed:
        raise ValueError(
            f"hardware.name={config.hardware.name} changes only the name and keeps the speeds of "
            "the chosen machine: choose a machine with hardware=, or set its speeds as well"
        )
    return notes


def job_title(out_dir: Path) -> str:
    """Which job of how many, with the name of its directory."""
    jobs = jobs_of(sweep_config(out_dir.parent))
    if jobs is None or not out_dir.name.isdigit():
        return f"job {out_dir.name}"
    return f"job {out_dir.name} ({int(out_dir.name) + 1} of {len(jobs)})"


def swept(out_dir: Path) -> list[str]:
    """What this job of a sweep was told and not every other one as well."""
    overrides = HydraConfig.get().overrides.task
    typed = sweep_config(out_dir.parent).hydra.overrides.task
    # Hydra escapes the colon of module:Class
    told = [re.sub(r"\\(.)", r"\1", override) for override in overrides]
    return [item for item in told if item not in typed] or told


def main() -> None:
    """Run, with what Hydra finds wrong put in one sentence too."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of being printed
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(show_help([word for word in sys.argv[1:] if not word.startswith("-")]))
    with in_one_sentence():
        sys.argv[1:] = schema.with_implied(schema.without_passwords(sys.argv[1:]))
    try:
        compose_and_run()
    except CONFIG_ERRORS as error:
        sys.exit(explain(error))
    except OSError as error:  # of what Hydra writes, or of a terminal that has gone
        code = explain(error, unfinished_run())
        if sweep_has_begun():
            say_what_there_is()
        sys.exit(code)
    except BrokenExecutor as error:  # a worker of joblib was killed
        exit_codes = re.search(r"\{(.+)\}", str(error))
        say_what_there_is(
            f"a worker process was killed ({exit_codes[1] if exit_codes else 'unknown signal'}), "
            f"perhaps for lack of memory (hydra.launcher.n_jobs=1 takes the least)"
        )
        sys.exit(1)
    except KeyboardInterrupt:
        say_what_there_is()
        sys.exit(INTERRUPTED)


def show_help(groups: Sequence[str]) -> int:
    """Print what there is to set."""
    try:
        print(knobs.help_of(groups))
    except (ValueError, OSError) as error:
        return explain(error)
    return 0


def unfinished_run() -> Path | None:
    """The directory of a single run that has begun, and would not be spoilt by an error.txt."""
    if not HydraConfig.initialized() or sweep_has_begun():
        return None
    out_dir = Path(HydraConfig.get().run.dir)
    return None if is_finished(out_dir) else out_dir


def say_what_there_is(why: str = "interrupted") -> None:
    """Sum up a run or a sweep that did not come to its end."""
    try:
        sum_up_interrupted(why)
    except KeyboardInterrupt:
        pass  # a second Ctrl-C skips the summary
    except Exception as error:
        explain(error)


if __name__ == "__main__":
    main()
