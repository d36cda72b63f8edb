"""The engines that can be compared, and the environments that their releases run in.

All releases of an engine share one environment of small dependencies, made on first use and kept in
the user's cache folder; all clones of this repository with the same versions of Python and torch
share it. It takes torch from the interpreter that runs this, and never fetches another. A release
is a folder of its package's files alone (or of those in Python), laid over it; a checkout is used
where it lies.
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
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

from experiments.diff.protocol import SideError

OURS = "hicache"
RELEASE = re.compile(r"\d+(\.\w+)+")
ROOT = Path(__file__).parents[2]  # where this package and ours lie
# the shared environment finds torch in the folder that this variable names when a process starts
TORCH_VARIABLE = "HICACHE_TORCH"
SHARED_PTH = f"import os, sys; sys.path.append(os.environ.get('{TORCH_VARIABLE}', sys.prefix))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What it takes to run any release of an engine's cache.

    Attributes:
        package: on the index, and what is imported.
        module: its `open_side`.
        requirements: of the shared environment; none of them asks for torch.
        alone: of the shared environment, installed without what they ask for.
        sources: where in a checkout the package lies.
        python_only: nothing that a release compiles is unpacked.
        has_storage: whether there is a tier below the host.
        compat: the preset in `conf/compat` with which ours decides like it.
    """

    package: str
    module: str
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("", "python", "src")
    python_only: bool = False
    has_storage: bool = True
    compat: str = "sglang_0_5_23"


# what SGLang's cache and scheduler import, found by trying
SGLANG = (
    "transformers==5.19.0",
    "openai==2.8.0",
    "apache-tvm-ffi==0.1.11",
    *("aiohttp", "dill", "distro", "gguf", "ipython", "loguru", "msgspec", "ninja", "numpy"),
    *("nvidia-ml-py", "orjson", "partial-json-parser", "pillow", "psutil", "pybase64", "pydantic"),
    *("pyzmq", "regex", "requests", "scipy", "sentencepiece", "starlette", "tqdm", "xxhash"),
)

# what vLLM's scheduler, cache and configuration import, found by trying
VLLM = (
    "transformers==5.19.0",
    "openai==3.54.0",
    "openai-harmony==0.0.8",
    "apache-tvm-ffi==0.1.15.post2",
    *("aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "diskcache", "einops", "fastapi"),
    *("filelock", "gguf", "jinja2", "llguidance", "msgspec", "numpy", "partial-json-parser"),
    *("pillow", "prometheus-client", "psutil", "py-cpuinfo", "pybase64", "pydantic", "pyyaml"),
    *("pyzmq", "regex", "requests", "sentencepiece", "setproctitle", "setuptools", "tiktoken"),
    *("tqdm", "uvloop"),
)

ENGINES = {
    "sglang": Engine(
        package="sglang",
        module="experiments.diff.sglang.side",
        requirements=SGLANG,
        alone=("torchvision==0.28.0", "compressed-tensors==0.18.0", "xgrammar==0.2.7"),
    ),
    "vllm": Engine(
        package="vllm",
        module="experiments.diff.vllm.side",
        requirements=VLLM,
        alone=("xgrammar==0.2.8",),
        python_only=True,
        has_storage=False,
        compat="vllm_0_33",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one side's process is started."""

    name: str
    interpreter: str
    module: str
    path: tuple[str, ...] = ()  # before everything else
    options: dict[str, str] = field(default_factory=dict)  # of its `open_side`


def prepare(engine: Engine, spec: str) -> Launch:
    """The environment of `spec`: a release, a checkout, a wheel, or `hicache`.

    Raises:
        SideError: it cannot be had.
    """
    if spec == OURS:
        return Launch(name=OURS, interpreter=sys.executable, module="experiments.diff.simulator")
    files, name = files_of(engine, spec)
    shared = _shared(engine, _cache_of(engine))
    return Launch(
        name=name,
        interpreter=str(shared / "bin" / "python"),
        module=engine.module,
        path=(str(files),),
    )


def _cache_of(engine: Engine) -> Path:
    return user_cache_path(OURS) / "diff" / engine.package


def files_of(engine: Engine, spec: str) -> tuple[Path, str]:
    """Where the package of `spec` lies, fetched if need be, and what it is called.

    Raises:
        SideError: it cannot be had.
    """
    package, path, cache = engine.package, Path(spec).expanduser(), _cache_of(engine)
    if path.suffix == ".whl" and path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        return _release(engine, str(path.resolve()), cache / f"wheel-{digest}"), path.stem
    if path.is_dir():
        for folder in engine.sources:
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
    # nothing of this clone's folder: another clone uses the same environment
    versions = (sys.version, sys.base_prefix, f"torch {version('torch')}", SHARED_PTH)
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
    # beside its place and moved there, so that what is there is whole
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
    """Tell the person who waits."""
    print(text, file=sys.stderr)


def environment_of(launch: Launch) -> dict[str, str]:
    """The environment variables of a side's process.

    Sets are in the same order each time: vLLM decided by it until 0.30.
    """
    own = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        TORCH_VARIABLE: _torch_folder(),
    }
    return {**os.environ, "PYTHONPATH": os.pathsep.join(launch.path), **own}
