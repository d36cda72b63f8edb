"""The engines that can be compared, and the environments that their releases run in.

All releases of an engine share one environment of small dependencies. It is made on first use in
the user's cache folder, and shared by all clones of this repository with the same versions of
Python and torch. It uses the torch of the running interpreter and never installs another. A release
is a folder with its package's files (or only the Python files), put on the module path; a checkout
is used in place.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from platformdirs import user_cache_path

from experiments.diff.protocol import SideError
from hicache.runs.errors import missing

OURS = "hicache"
RELEASE = re.compile(r"\d+(\.\w+)+")
ROOT = Path(__file__).parents[2]  # the folder of this package and of hicache
# this variable names the folder in which the shared environment finds torch
TORCH_VARIABLE = "HICACHE_TORCH"
SHARED_PTH = f"import os, sys; sys.path.append(os.environ.get('{TORCH_VARIABLE}', sys.prefix))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine whose cache can be compared, with what its releases need to run.

    Attributes:
        package: name of the Python package, and of our package that drives the engine's cache.
        alone: packages to install without their dependencies.
        python_only: True if only the Python files of a release are used, without compiled ones.
        has_storage: True if the cache has a storage tier below host memory.
        compat: name of our preset in `conf/compat` that imitates the engine.
        keeps_windows: beginnings of the names of releases that keep the windows of all blocks of a
            prompt. Later ones keep those from which a later prompt can continue.
    """

    package: str
    alone: tuple[str, ...] = ()
    python_only: bool = False
    has_storage: bool = True
    compat: str = "sglang_0_5_23"
    keeps_windows: tuple[str, ...] = ()

    @property
    def requirements(self) -> list[str]:
        """Return the packages that its imports need, found by trial. None requires torch."""
        file = Path(__file__).parent / self.package / "requirements.txt"
        return file.read_text().split()


ENGINES = {
    "sglang": Engine(
        package="sglang",
        alone=("torchvision==0.28.0", "compressed-tensors==0.18.0", "xgrammar==0.2.7"),
    ),
    "vllm": Engine(
        package="vllm",
        alone=("xgrammar==0.2.8",),
        python_only=True,
        has_storage=False,
        compat="vllm_0_33",
        keeps_windows=tuple(f"0.{number}." for number in range(22, 30)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    name: str
    interpreter: str
    module: str
    path: tuple[str, ...] = ()  # first entries of the module path
    options: dict[str, str] = field(default_factory=dict)  # of its `open_side`
    kept: Path | None = None  # folder of the answers that are kept


def prepare(engine: Engine, spec: str) -> Launch:
    """Return how to start the cache that `spec` names.

    `spec` is a release, a source checkout, a wheel, or `hicache` for our own simulator. Releases
    are downloaded if needed.

    Raises:
        SideError: the cache cannot be found or downloaded.
    """
    if spec == OURS:
        return Launch(name=OURS, interpreter=sys.executable, module="experiments.diff.simulator")
    files, name = files_of(engine, spec)
    shared = _shared(engine, _cache_of(engine))
    return Launch(
        name=name,
        interpreter=str(shared / "bin" / "python"),
        module=f"experiments.diff.{engine.package}.side",
        path=(str(files),),
    )


def _cache_of(engine: Engine) -> Path:
    return user_cache_path(OURS) / "diff" / engine.package


def files_of(engine: Engine, spec: str) -> tuple[Path, str]:
    """Return the folder that contains an engine's package, and a name for the version.

    `spec` is a release, a source checkout or a wheel. Releases are downloaded if needed.

    Raises:
        SideError: the package cannot be found or downloaded.
    """
    package, path, cache = engine.package, Path(spec).expanduser(), _cache_of(engine)
    if path.suffix == ".whl" and path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        return _release(engine, str(path.resolve()), cache / f"wheel-{digest}"), path.stem
    if path.is_dir():
        for folder in ("", "python", "src"):
            if (path / folder / package / "__init__.py").is_file():
                return (path / folder).resolve(), path.resolve().name
        raise SideError(
            f"{spec} contains no {package}: give a checkout, a folder that contains {package}/, or"
            " a wheel"
        )
    if RELEASE.fullmatch(spec):
        return _release(engine, f"{package}=={spec}", cache / spec), f"{package} {spec}"
    raise SideError(
        f"{spec} is neither a release of {engine.package}, nor {OURS}, nor a path that exists"
    )


def _release(engine: Engine, wanted: str, folder: Path) -> Path:
    def install(made: Path) -> None:
        if engine.python_only:
            _unpack_python(wanted, made)
        else:
            _pip(sys.executable, "--no-deps", "--no-compile", "--target", str(made), wanted)
        if not (made / engine.package / "__init__.py").is_file():
            raise SideError(f"{wanted} contains no {engine.package}")

    return _made(folder, install, f"fetching {wanted}")


def _unpack_python(wanted: str, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as fetched:
        arguments = ("--no-deps", "--only-binary", ":all:", "--dest", fetched, wanted)
        _pip(sys.executable, *arguments, command="download")
        with zipfile.ZipFile(next(Path(fetched).glob("*.whl"))) as wheel:
            kept = (name for name in wheel.namelist() if name.endswith((".py", "/METADATA")))
            wheel.extractall(made, kept)


def _shared(engine: Engine, cache: Path) -> Path:
    # no path of this clone: other clones share the environment
    try:
        torch = version("torch")
    except PackageNotFoundError:
        raise SideError(missing("torch")) from None
    versions = (sys.version, sys.base_prefix, f"torch {torch}", SHARED_PTH)
    asked = (*engine.requirements, *engine.alone, *versions)
    digest = hashlib.sha256("\n".join(asked).encode()).hexdigest()[:12]

    def install(made: Path) -> None:
        venv.create(made, with_pip=True, symlinks=True)
        python = str(made / "bin" / "python")
        _pip(python, *engine.requirements)
        _pip(python, "--no-deps", *engine.alone)
        site = next(made.glob("lib/python*/site-packages"))
        # read last, so that the environment's own packages come first
        (site / "zz_shared.pth").write_text(f"{SHARED_PTH}\n")

    said = f"making the environment of {engine.package} (some minutes, once)"
    return _made(cache / f"shared-{digest}", install, said)


def _torch_folder() -> str:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SideError("torch must be installed here: both sides use this installation")
    return str(Path(torch.origin).parents[1])


def _made(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    # unpacked elsewhere and moved, so that the folder is never partial
    if folder.is_dir():
        return folder
    say(f"{what} ...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as parent:
        made = Path(parent) / folder.name
        make(made)
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            if not folder.is_dir():
                raise
    return folder


def _pip(python: str, *arguments: str, command: str = "install") -> None:
    pip = [python, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or ["pip gave no reason"])[-1]
        raise SideError(f"cannot install {arguments[-1]}: {reason.removeprefix('ERROR: ')}")


def say(text: str) -> None:
    print(text, file=sys.stderr)


def environment_of(launch: Launch) -> dict[str, str]:
    """Return the environment variables for the process that runs a compared cache.

    The variables make the order of Python sets the same in each run.
    """
    own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", TORCH_VARIABLE: _torch_folder()}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(launch.path), **own}
