"""The origin of a run: code, versions and inputs, written next to its results as `provenance.json`.

`summary.json` does not hold the origin, so equal runs stay byte-identical. For a user's policy
class, the origin lists its module and all local modules that this module imports, directly or
indirectly. Local means outside the standard library and the package directories. Files that these
modules read are not listed, nor are modules that they import by name at run time.
"""

import platform
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import file_digest, sha256
from importlib import metadata, util
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import numpy as np

import hicache
from hicache.config import ExperimentConfig, TraceConfig
from hicache.results.tracking import write_json
from hicache.runs.stored import read_json
from hicache.workload.data import TRACES, find_trace

FILE = "provenance.json"
GIT_S = 2.0  # longest wait for git, in case the file system is slow
REAL_ONLY = ("torch", "triton")  # a simulated run never imports them
VERSIONS = ("python", "numpy", *REAL_ONLY)
# names the rules by which a run decides: the digest of tests/golden/summaries.csv, written by
# python -m tests.golden
RULES = "0be9ac7f"


def write_provenance(config: ExperimentConfig, out_dir: Path) -> None:
    write_json(out_dir / FILE, provenance_of(config))


def read_provenance(directory: Path) -> dict[str, Any]:
    file = directory / FILE
    found = read_json(file) if file.is_file() else {}
    made_of = {key: found.get(key) or {} for key in ("hicache", "trace", "policies")}
    for name, item in (*made_of.items(), *_policies(made_of["policies"])):
        if not isinstance(item, dict) or not isinstance(item.get("sha256") or "", str):
            raise ValueError(f"{file}: {name} must be a mapping with a text sha256")
    for key in ("directory", "rules"):
        if not isinstance(found.get(key, ""), str):
            raise ValueError(f"{file}: {key} must be a text, got {found[key]!r:.40}")
    return found


def _policies(found: Any) -> Iterable[tuple[str, Any]]:
    return found.items() if isinstance(found, dict) else ()


def changed_since(stored: Mapping[str, object], config: ExperimentConfig) -> list[str]:
    """Return the names of the inputs of a run that have changed since the run was stored.

    The inputs are the code of hicache, the user's policy classes, the trace, and package versions.

    Args:
        stored: the content of the file `provenance.json` of the stored run.
        config: the settings of the run.

    Raises:
        FileNotFoundError: the trace is missing and cannot be downloaded.
        ValueError: the downloaded trace has the wrong digest.
    """
    now = provenance_of(config)
    then, wanted = sources_of(stored), sources_of(now)
    # a class whose module cannot be read now has changed too
    names = dict.fromkeys([*wanted, *own_classes(config)])
    changed = [name for name in names if name not in wanted or then.get(name) != wanted[name]]
    return changed + [name for name in VERSIONS if stored.get(name) != now.get(name)]


def sources_of(provenance: Mapping[str, Any]) -> dict[str, str]:
    found = {"hicache": "hicache", "workload": "trace"}
    items = {name: provenance.get(key) or {} for name, key in found.items()}
    items |= provenance.get("policies") or {}
    return {name: item["sha256"][:8] for name, item in items.items() if item.get("sha256")}


def provenance_of(config: ExperimentConfig) -> dict[str, object]:
    package = Path(hicache.__file__).parent
    found: dict[str, object] = {
        "directory": str(Path.cwd()),  # relative paths of the settings start here
        "hicache": {
            "version": _version("hicache"),
            "sha256": _digest_of_package(package),  # of its Python files, edited or not
            **_checkout(package.parent),
        },
        "rules": RULES,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "policies": {
            knob: {"class": name, **_source(name.partition(":")[0])}
            for knob, name in own_classes(config).items()
        },
    }
    if config.executor.kind != "simulated":
        found |= {name: _version(name) for name in REAL_ONLY}
    if config.workload.kind in TRACES:
        found["trace"] = _trace(config)
    return found


def _trace(config: ExperimentConfig) -> dict[str, str]:
    assert isinstance(config.workload, TraceConfig)
    path = find_trace(
        TRACES[config.workload.kind], path=config.workload.path, data_dir=config.data_dir
    )
    if path.is_file():
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
    else:
        digest = _digest(_files_in(path, "*"))
    return {"file": str(path.absolute()), "sha256": digest}


def own_classes(config: ExperimentConfig) -> dict[str, str]:
    """Return the user's classes, as `module:Class` by the knob that names them."""
    named = {
        "cache.policy": config.cache.policy,
        "storage.kind": config.storage.kind,
    }
    if isinstance(config.workload, TraceConfig):
        named["workload.tokenizer"] = config.workload.tokenizer or ""
    return {knob: name for knob, name in named.items() if ":" in name}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed, or run from a checkout
        return None


# cached: a module keeps the contents it had at import, even if its file changes
@lru_cache(maxsize=2)
def _digest_of_package(package: Path) -> str:
    return _digest(_files_in(package, "*.py"))


def _files_in(folder: Path, pattern: str) -> dict[str, Path]:
    found = (path for path in folder.rglob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def _digest(files: Mapping[str, Path]) -> str:
    digest = sha256()
    for name, path in sorted(files.items()):
        contents = path.read_bytes()
        digest.update(f"{name} {len(contents)}\n".encode())
        digest.update(contents)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _checkout(root: Path) -> dict[str, object]:
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
        imported = _local_imports(module)
        imported.pop(module, None)
        return {
            "file": str(Path(spec.origin).absolute()),
            "imports": {name: str(path) for name, path in sorted(imported.items())},
            "sha256": _digest(imported | {module: Path(spec.origin)}),
        }
    except Exception:  # the run itself reports this error, in a better sentence
        return {}


def _local_imports(module: str) -> dict[str, Path]:
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    installed = [*standard, *site.getsitepackages(), site.getusersitepackages()]
    places = [Path(each).resolve() for each in installed]
    local = [
        each
        for each in sys.path
        if not any(Path(each).resolve().is_relative_to(place) for place in places)
    ]
    finder = ModuleFinder(path=local, excludes=["hicache"])
    with suppress(ImportError):  # installed modules are skipped
        finder.import_hook(module)
    files = {name: getattr(found, "__file__", None) for name, found in finder.modules.items()}
    return {name: Path(file).absolute() for name, file in files.items() if file is not None}
