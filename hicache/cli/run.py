"""Run one experiment, or a sweep.

hicache run                                     replay the built-in workload
hicache run workload=mooncake_conversation storage=slab prefetch.stop=best_effort
hicache run -m cache.host_gib=64,128,256 seed=0,1,2
hicache run experiment=prefetch_stop            run a question with its grid
hicache run -m cache.host_gib=64,128 --until 0.05   add seeds until intervals are narrow
hicache run --help storage                      show the knobs of a group

A run writes its results to a directory and prints the path as its last line. To continue an
interrupted sweep, repeat the command with `hydra.sweep.dir=` and the directory of the sweep.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from hicache.cli import knobs, until
from hicache.cli.command import in_one_sentence
from hicache.cli.progress import progress_bar
from hicache.cli.resume import claim
from hicache.cli.sweep import end_early
from hicache.cli.tables.groups import COMPOSED, TYPED
from hicache.cli.terminal import show_run
from hicache.runs import schema
from hicache.runs.checks import BusyError, as_yaml, locked
from hicache.runs.errors import CONFIG_ERRORS, report_error
from hicache.runs.grid import stored_choices, varied
from hicache.runs.job import Outcome, run_job
from hicache.runs.stored import is_finished, yaml_of

UNEQUAL = 3  # exit code if the cache gave a model wrong bytes
LAUNCHERS = ("joblib", "ray", "submitit")  # errors of these packages mean a lost worker
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended: 128 + 2

schema.register()


@hydra.main(version_base="1.3", config_path=str(schema.CONF), config_name="config")
def compose_and_run(cfg: DictConfig) -> int:
    # a job of a sweep returns its exit code instead of exiting, so that the other jobs still run
    out_dir = Path(HydraConfig.get().runtime.output_dir)
    is_job = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        with locked(out_dir) if is_job else nullcontext():  # a single run is locked already
            write_choices(out_dir)
            summary = make(cfg, out_dir, is_job=is_job)
        code = UNEQUAL if summary.get("verify/wrong_count") and not is_job else 0
    except Exception as error:  # one failed job must not stop the other jobs of the sweep
        # do not write error.txt over a finished run, or over the run of another process
        is_used = is_finished(out_dir) or isinstance(error, BusyError)
        code = report_error(error, None if is_used else out_dir)
    if code and not is_job:
        sys.exit(code)
    return code


def _run_single(overrides: list[str]) -> None:
    # Hydra's own main composes twice, to learn whether an experiment asks for a sweep, and copies
    # the settings several times
    with initialize_config_dir(str(schema.CONF), version_base="1.3"):
        cfg = compose("config", overrides, return_hydra_config=True)
    with read_write(cfg), open_dict(cfg):
        out_dir = cfg.hydra.runtime.output_dir = str(Path(cfg.hydra.run.dir).absolute())
        HydraConfig.instance().set_config(cfg)
        del cfg["hydra"]
    claim(cfg, out_dir)
    compose_and_run.__wrapped__(cfg)


def make(cfg: DictConfig, out_dir: Path, *, is_job: bool) -> Mapping[str, float]:
    """Run the experiment of Hydra's settings `cfg`, and return its metrics.

    `is_job` is True if the run belongs to a sweep. The results are then not printed.
    """
    config, overrides = schema.to_config(cfg), HydraConfig.get().overrides.task
    if is_job:
        overrides = varied(overrides, stored_choices(out_dir.parent))
        return run_job(config, out_dir, overrides, is_job=True)
    summary = run_job(config, out_dir, overrides, bar=progress_bar, show=show)
    print(out_dir, flush=True)
    return summary


def write_choices(out_dir: Path) -> None:
    # of Hydra's files those that are read later; Hydra itself takes longer than a small job
    choices = {"hydra": {"runtime": {"choices": dict(HydraConfig.get().runtime.choices)}}}
    for name, values in ((TYPED, [*HydraConfig.get().overrides.task]), (COMPOSED, choices)):
        (out_dir / name).parent.mkdir(exist_ok=True)
        (out_dir / name).write_text(yaml_of(values))


def show(outcome: Outcome) -> None:
    show_run(outcome)
    for metric in outcome.config.metrics:
        if metric not in outcome.summary:
            sys.stderr.write(f"this run has no metric {metric}\n")


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    # argparse wants overrides to be adjacent
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    if any(word.partition("=")[0] == "--until" for word in sys.argv[1:]):
        until.main(sys.argv[1:])
        return
    if {"-h", "--help"} & set(sys.argv[1:]):
        show_help([word for word in sys.argv[1:] if not word.startswith("-")])
        return
    with in_one_sentence():
        if [word for word in sys.argv[1:] if word.startswith("-")] == [
            "--cfg"
        ] and "job" in sys.argv:
            words = [word for word in sys.argv[1:] if word not in ("--cfg", "job")]
            # Hydra would leave out what is derived, such as the values of model.from_hf
            print(as_yaml(schema.config_of(*words)), end="")
            return
        sys.argv[1:] = schema.with_implied(sys.argv[1:])
    try:
        if any(re.match(r"-|[+~]*(experiment\b|hydra(?!\.run))", word) for word in sys.argv[1:]):
            compose_and_run()
        else:
            _run_single(sys.argv[1:])
    except CONFIG_ERRORS as error:
        sys.exit(report_error(error))
    except OSError as error:  # Hydra cannot write its files, or the terminal is closed
        code = report_error(error, unfinished_run())
        say_what_there_is("interrupted")
        sys.exit(code)
    except KeyboardInterrupt:
        if not say_what_there_is("interrupted"):
            sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in LAUNCHERS:
            sys.exit(report_error(error, unfinished_run()))
        exit_codes = re.search(r"\{(.+)\}", str(error))  # the exit codes of joblib's workers
        told = exit_codes[1] if exit_codes else str(error).partition("\n")[0]
        say_what_there_is(f"a worker process died ({told}), perhaps for lack of memory")
        sys.exit(1)


def show_help(groups: Sequence[str]) -> None:
    with in_one_sentence():
        print(knobs.help_of(groups))


def unfinished_run() -> Path | None:
    if not HydraConfig.initialized() or HydraConfig.get().mode is RunMode.MULTIRUN:
        return None
    out_dir = Path(HydraConfig.get().run.dir)
    return None if is_finished(out_dir) else out_dir


def say_what_there_is(why: str) -> bool:
    try:
        return end_early(why)
    except KeyboardInterrupt:
        pass  # a second Ctrl-C skips the summary
    except Exception as error:
        report_error(error)
    return True
