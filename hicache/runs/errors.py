"""Tells the user what went wrong: in one sentence, with the exit code.

An error ends a run with one sentence on stderr and in `error.txt` of the run directory. A fault of
the user's own class adds the frames of that class, and a fault of ours a traceback, as does
`HICACHE_TRACEBACK=1`.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from hicache.config import WORKLOADS
from hicache.rules import Rules
from hicache.runs.schema import known_keys
from hicache.runs.stored import ERROR_FILE
from hicache.secret import masked
from hicache.storage.base import StorageError
from hicache.user_code import UserCodeError, told

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)
BAD_INPUT = (ValueError, OSError, StorageError, *CONFIG_ERRORS)
REPORT = "a fault of hicache; please report it with these lines and those of `hicache env`"
# settings of the last release
RENAMED = {
    "cache.eviction": "cache.policy, and its slru is sglang_slru there",
    "cache.device_tokens": "cache.device.tokens.full",
    "cache.host_tokens": "cache.host.tokens.full",
    "cache.swa_device_tokens": "cache.device.tokens.swa",
    "cache.swa_host_tokens": "cache.host.tokens.swa",
    "cache.device_states": "cache.device.states",
    "cache.host_states": "cache.host.states",
    "cache.swa_device_share": "cache.device.share.swa",
    "cache.swa_host_share": "cache.host.share.swa",
    "cache.mamba_device_share": "cache.device.share.mamba",
    "cache.mamba_host_share": "cache.host.share.mamba",
    "cache.mem_fraction_static": "cache.device.sglang_fraction",
    "cache.gpu_memory_utilization": "cache.device.vllm_fraction",
    "cache.host_ratio": "cache.host.sglang_ratio",
    "cache.host_gib_per_rank": "cache.host.sglang_gib",
    "compat.quirks.await_sidecars": "prefetch.await_sidecars",
    "compat.quirks.hit_agreement": "parallel.hit_agreement",
    **{
        f"{group}.{each.name}": f"compat.rules.{each.name}"
        for each in fields(Rules)
        for group in ("compat.quirks", "cache", "scheduler", "prefetch", "parallel")
    },
    "cache.windows": "cache.checkpoints",
    "workload.windows": "workload.slice, as i/n",
    "workload.window": "workload.slice, as i/n",
    "workload.parallel": "workload.in_flight",
    "executor.storage_deadline_s": "storage.deadline_s",
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# by optional package, the extra of hicache that installs it
EXTRAS = {
    **dict.fromkeys(("pandas", "pyarrow", "matplotlib", "tabulate", "jinja2"), "analysis"),
    **dict.fromkeys(("torch", "triton", "einops"), "kernels"),
    **dict.fromkeys(("redis", "hiredis"), "storage"),
    "wandb": "wandb",
    "ray": "ray",
    "submitit": "slurm",
}


def missing(package: str) -> str:
    return f"{package} is not installed: pip install 'hicache[{EXTRAS[package]}]'"


def report_error(error: BaseException, out_dir: Path | None = None) -> int:
    """Print an error to stderr, write it to `error.txt` in `out_dir`, and return the exit code.

    The first line names the fault. The frames of the user's own code follow if that code failed,
    and a traceback follows if the program has a bug. The exit code is 2 if the user's input is
    wrong, and 1 otherwise. None as `out_dir` means that no file is written.
    """
    is_input = isinstance(error, BAD_INPUT) or _missing_package(error) is not None
    lines = [one_sentence(error, out_dir)]
    if isinstance(error, UserCodeError):
        lines.append(error.own_frames())
    elif not is_input:
        lines[0] = f"{told(error)}: {REPORT}"
    if os.environ.get("HICACHE_TRACEBACK") == "1" or lines[0].endswith(REPORT):
        lines.append("".join(traceback.format_exception(error)).rstrip())
    text = masked("\n".join(filter(None, lines))) + "\n"
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
    if out_dir is not None and out_dir.is_dir():
        file = out_dir / ERROR_FILE
        try:
            file.write_text(text)
        except OSError:  # a truncated sentence would mislead
            file.unlink(missing_ok=True)
    return 2 if is_input else 1


def _missing_package(error: BaseException) -> str | None:
    # the optional package whose import failed; None for other errors
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name if name in EXTRAS else None


def one_sentence(error: BaseException, out_dir: Path | None = None) -> str:
    package = _missing_package(error)
    if package is not None:
        return missing(package)
    if isinstance(error, CONFIG_ERRORS):
        return sentence(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = error.filename or out_dir or "the output of this command"
        return (
            f"{os.strerror(error.errno)}: cannot write to {where}; files written before are kept, "
            f"and the same command continues once there is space"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__


def sentence(error: BaseException) -> str:
    if isinstance(error, OverrideParseException):
        return (
            f"cannot parse {error.override}: expected KEY=VALUE; quote a value that contains "
            f"special characters: 'KEY=\"VALUE\"'"
        )
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = _gist(str(cause))
        if text and not any(text in part for part in parts):
            parts.append(text)
        cause = cause.__cause__ or cause.__context__
    told = ": ".join(parts) or type(error).__name__
    unknown = re.search(r"Could not (?:override|append to config)[^']*'([^']+)'", told)
    if unknown:
        told += _of_other_workload(unknown[1]) or meant(unknown[1].lstrip("+~"), known_keys())
    in_file = re.search(r"composing config: Key '(\w+)' not in '(\w+)'", told)
    if in_file and in_file[2] in {kind.__name__ for kind in WORKLOADS.values()}:
        told += _of_other_workload(f"workload.{in_file[1]}")
    launcher = re.search(r"hydra/launcher/(ray|submitit)", told)
    if launcher:
        return missing(launcher[1])
    if "BasicLauncherConf" in told:
        told += " (this setting needs hydra/launcher=joblib)"
    if told.startswith("Ambiguous value for argument"):
        told += " (add -m to run every value, or write a list as [a,b])"
    return told


def meant(name: str, known: Collection[str]) -> str:
    """Return " (did you mean ...?)" with the closest known name, or else the names of its group.

    A known name that ends with `/name`, as metrics may, is preferred.
    """
    if name in RENAMED:
        return f" ({name} is now {RENAMED[name]})"
    group = name[: name.rfind(".") + 1]  # that two settings are of one group makes them not similar
    peers = [each.removeprefix(group) for each in known if each.startswith(group)]
    near = [each for each in known if each.endswith(f"/{name}")]
    near += [group + each for each in get_close_matches(name.removeprefix(group), peers, n=1)]
    near += [] if peers else get_close_matches(name, known, n=1)
    if near:
        return f" (did you mean {near[0]}?)"
    own = [each for each in peers if "." not in each] if group else []
    return f" ({group.rstrip('.')} has {', '.join(own)})" if own else ""


def _of_other_workload(name: str) -> str:
    key = name.lstrip("+~").removeprefix("workload.")
    kinds = [kind for kind, schema in WORKLOADS.items() if key in known_keys(schema)]
    return f" ({name} is a setting of workload={','.join(kinds)})" if kinds and key != name else ""


def _gist(text: str) -> str:
    said, _, rest = text.strip().partition("\nAvailable options")
    listed = rest.partition("Config search path")[0].splitlines()[1:]
    options = takewhile(bool, map(str.strip, listed))
    wanted = ", ".join(option for option in options if option != "schema")
    # the first line names the error; the others locate it in OmegaConf's terms
    first = said.partition("\n")[0].strip().rstrip(".:")
    return f"{first} (expected one of {wanted})" if wanted else first
