"""What is checked before a run: its settings, and whether its directory is free.

A run is finished if `summary.json`, its last file, exists and `error.txt` does not. It is repeated
if its code, trace, policy class or package versions have changed.
"""

import difflib
import fcntl
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from hicache.config import GROUPS, ExperimentConfig
from hicache.knob import inert_knobs
from hicache.results.keys import KNOWN
from hicache.results.tracking import plain
from hicache.results.verdict import STAGE
from hicache.runs import provenance
from hicache.runs.stored import CONFIG_FILE, flat, is_finished, read_yaml, yaml_of

REPLACED = {  # knobs of the cache, and those that replace them
    "device_gib": ("device.sglang_fraction", "device.vllm_fraction", "unlimited"),
    "host_gib": ("host.sglang_ratio", "host.sglang_gib", "unlimited"),
}


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


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    descriptor = lock(directory)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def unheeded(config: ExperimentConfig, overrides: Sequence[str]) -> list[str]:
    """Return a sentence for each setting in `overrides` that has no effect.

    Raises:
        ValueError: the hardware's name is changed but none of its speeds.
    """
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    inert = {
        key: f"{key} has no effect: it is used only with {where}"
        for key, where in inert_knobs(config, GROUPS).items()
    }
    notes = [note for key, note in inert.items() if key in typed]
    for key, others in REPLACED.items():
        for other in others if f"cache.{key}" in typed else ():
            value = attrgetter(other)(config.cache)
            if value is not None and value is not False:
                notes.append(f"cache.{key} has no effect: cache.{other}={value} replaces it")
    machine = [key for key in typed if key.startswith("hardware.")]
    if machine == ["hardware.name"] and "hardware" not in typed:
        raise ValueError(
            f"hardware.name={config.hardware.name} changes only the name and keeps the speeds of "
            "the chosen machine: choose a machine with hardware=, or set its speeds as well"
        )
    return notes


def as_yaml(config: ExperimentConfig) -> str:
    return yaml_of(plain(config))


def _difference(file: Path, config: ExperimentConfig) -> str:
    if not file.is_file():
        return ""
    then, now = flat(read_yaml(file, dict)), flat(plain(config))
    keys = [key for key in dict.fromkeys([*then, *now]) if then.get(key) != now.get(key)]
    shown = [f"{key} was {then.get(key)} and is {now.get(key)}" for key in keys[:2]]
    more = [f"{len(keys) - 2} more"] if len(keys) > 2 else []
    return f" ({', '.join(shown + more)})"
