"""What made a run: code, versions and inputs, written beside its results as `provenance.json`.

None of it enters `summary.json`: equal runs stay equal bytes. Of a policy of the user's own it
knows the file that its class is in, not what that file imports in its turn.
"""

import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path

import numpy as np

import hicache
from hicache.config import ExperimentConfig
from hicache.tracking import write_json
from hicache.workload.build import TRACES
from hicache.workload.data import find_trace

FILE = "provenance.json"
MAX_TRACE_BYTES = 64 * 2**20  # a larger one would take longer to digest than is worth it
GIT_S = 2.0  # a file system may be slow; the commit is not worth more


def write_provenance(config: ExperimentConfig, out_dir: Path) -> None:
    """Write what is known before a run; its trace is added by `add_trace`, once there is one."""
    write_json(out_dir / FILE, _provenance(config))


def add_trace(config: ExperimentConfig, out_dir: Path) -> None:
    """Write the same with the trace file of a run, which by then has been found or downloaded."""
    kind = config.workload.kind
    if kind not in TRACES:
        return
    path = find_trace(TRACES[kind], path=config.workload.path, data_dir=config.data_dir)
    trace: dict[str, object] = {"file": str(path.absolute())}
    if path.is_file() and path.stat().st_size <= MAX_TRACE_BYTES:
        state = path.stat()
        trace["sha256"] = _digest_of_trace(path, state.st_mtime_ns, state.st_size)
    write_json(out_dir / FILE, _provenance(config) | {"trace": trace})


def sources_of(provenance: Mapping[str, object]) -> dict[str, str]:
    """The digests of what a run was made of, by what they are digests of: 8 hex digits each."""
    sources: dict[str, str] = {}
    policies = provenance.get("policies")
    found = {
        "hicache": provenance.get("hicache"),
        "workload": provenance.get("trace"),
        **(policies if isinstance(policies, Mapping) else {}),
    }
    for name, item in found.items():
        digest = item.get("sha256") if isinstance(item, Mapping) else None
        if digest:
            sources[name] = str(digest)[:8]
    return sources


def code_of(config: ExperimentConfig) -> dict[str, str]:
    """The digests, as of `sources_of`, of the code that a run of `config` would have now."""
    return sources_of(_provenance(config))


def _provenance(config: ExperimentConfig) -> dict[str, object]:
    package = Path(hicache.__file__).parent
    return {
        "hicache": {
            "version": _version(),
            "sha256": _digest_of_package(package),  # of its Python files, edited or not
            **_checkout(package.parent),
        },
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "policies": {
            knob: {"class": name, **_source(name.partition(":")[0])}
            for knob, name in _policies(config)
            if ":" in name
        },
    }


def _policies(config: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    # a knob that names a policy has its `_args` beside it
    assert is_dataclass(config)
    names = {item.name for item in fields(config)}
    for name in sorted(names):
        value = getattr(config, name)
        if f"{name}_args" in names:
            yield prefix + name, value
        elif is_dataclass(value):
            yield from _policies(value, f"{prefix}{name}.")


def _version() -> str | None:
    try:
        return metadata.version("hicache")
    except metadata.PackageNotFoundError:  # run from a checkout, not installed
        return None


# cached, for a module keeps the contents it had when it was loaded, whatever becomes of its file
@lru_cache(maxsize=1)
def _digest_of_package(package: Path) -> str:
    digest = sha256()
    for path in sorted(package.rglob("*.py")):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(contents)}\n".encode())
        digest.update(contents)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _checkout(root: Path) -> dict[str, object]:
    """The commit, and whether tracked files differ from it; nothing outside a checkout."""
    if not (root / ".git").exists():
        return {}
    command = ["git", "--no-optional-locks", "-C", str(root), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    return {
        "commit": heads[0] if heads else None,
        "tracked_files_differ": any(not line.startswith("#") for line in lines),
    }


@lru_cache(maxsize=32)
def _source(module: str) -> dict[str, object]:
    try:
        spec = util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        path = Path(spec.origin)
        return {"file": str(path.absolute()), "sha256": sha256(path.read_bytes()).hexdigest()}
    except Exception:  # what is wrong with it the run itself will say, in a better sentence
        return {}


@lru_cache(maxsize=8)
def _digest_of_trace(path: Path, modified_ns: int, size: int) -> str:
    return sha256(path.read_bytes()).hexdigest()
