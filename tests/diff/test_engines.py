import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.diff import engines
from experiments.diff.engines import ENGINES, environment_of, prepare
from experiments.diff.protocol import SideError

SGLANG = ENGINES["sglang"]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """An empty cache folder, and a fake pip that writes empty packages; returns pip's arguments."""
    told: list[tuple[str, ...]] = []

    def pip(python: str, *arguments: str, command: str = "install") -> None:
        told.append(arguments)
        if command == "download":
            wheel = Path(arguments[arguments.index("--dest") + 1]) / "vllm-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as packed:
                for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm-1.dist-info/METADATA"):
                    packed.writestr(name, "")
        if "--target" in arguments:
            package = Path(arguments[arguments.index("--target") + 1]) / "sglang"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()

    def make_venv(folder: Path, **_: object) -> None:
        (folder / "lib" / "python3" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(engines, "user_cache_path", lambda _: tmp_path / "cache")
    monkeypatch.setattr(engines, "_pip", pip)
    monkeypatch.setattr(engines.venv, "create", make_venv)
    return told


def test_the_root_holds_the_packages_experiments_and_hicache() -> None:
    assert (engines.ROOT / "experiments" / "diff" / "engines.py").is_file()
    assert (engines.ROOT / "hicache" / "__init__.py").is_file()


def test_a_release_is_fetched_once_and_without_its_dependencies(
    installs: list[tuple[str, ...]],
) -> None:
    launches = [prepare(SGLANG, "0.5.23") for _ in range(2)]
    assert launches[0] == launches[1]
    fetched = [told for told in installs if told[-1] == "sglang==0.5.23"]
    assert len(fetched) == 1
    assert "--no-deps" in fetched[0]
    assert environment_of(launches[0])["PYTHONPATH"].endswith("0.5.23")


def test_a_set_is_in_the_same_order_in_every_process() -> None:
    launch = prepare(SGLANG, "hicache")
    program = "print(*{bytes([number]) for number in range(50)})"
    orders = {
        subprocess.run(
            [launch.interpreter, "-c", program],
            env=environment_of(launch),
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(3)
    }
    assert len(orders) == 1


def test_compiled_files_of_a_vllm_release_are_not_kept(installs: list[tuple[str, ...]]) -> None:
    launches = [prepare(ENGINES["vllm"], "0.33.0") for _ in range(2)]
    (fetched,) = [told for told in installs if told[-1] == "vllm==0.33.0"]
    assert "--no-deps" in fetched
    (folder,) = launches[0].path
    files = {path.name for path in Path(folder).rglob("*") if path.is_file()}
    assert files == {"__init__.py", "METADATA"}


@pytest.mark.parametrize(("engine", "release"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_no_environment_fetches_torch(
    installs: list[tuple[str, ...]], engine: str, release: str
) -> None:
    launch = prepare(ENGINES[engine], release)
    wanted = {each.partition("==")[0] for told in installs for each in told}
    assert not wanted & {"torch", "triton"}
    assert launch.module == f"experiments.diff.{engine}.side"
    site = next(Path(launch.interpreter).parents[1].glob("lib/python*/site-packages"))
    assert (site / "zz_shared.pth").read_text() == f"{engines.SHARED_PTH}\n"
    program = f"import sys; {engines.SHARED_PTH}; print(sys.path[-1])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment_of(launch), capture_output=True, check=True)
    assert (Path(done.stdout.decode().strip()) / "torch" / "__init__.py").is_file()


def test_clones_share_an_environment_only_if_they_have_the_same_torch_version(
    installs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interpreter(folder: str, version: str) -> str:
        torch = SimpleNamespace(origin=f"/{folder}/site-packages/torch/__init__.py")
        with monkeypatch.context() as patch:
            patch.setattr(engines.importlib.util, "find_spec", lambda _: torch)
            patch.setattr(engines, "version", lambda _: version)
            return prepare(SGLANG, "0.5.23").interpreter

    assert interpreter("one", "2.13.0") == interpreter("another", "2.13.0")
    assert interpreter("one", "2.13.0") != interpreter("one", "2.14.0")


def test_two_releases_share_one_environment(installs: list[tuple[str, ...]]) -> None:
    first, second = (prepare(SGLANG, release) for release in ("0.5.22", "0.5.23"))
    assert first.interpreter == second.interpreter
    assert first.path != second.path


def test_a_checkout_is_used_in_place(installs: list[tuple[str, ...]], tmp_path: Path) -> None:
    package = tmp_path / "mine" / "python" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    launch = prepare(SGLANG, str(tmp_path / "mine"))
    assert launch.path == (str(package.parent),)
    assert launch.name == "mine"


def test_equal_wheels_are_installed_once(installs: list[tuple[str, ...]], tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-9.whl"
    paths = []
    for text in ("one", "two", "one"):
        wheel.write_text(text)
        paths.append(prepare(SGLANG, str(wheel)).path)
    assert paths[0] == paths[2] != paths[1]


def test_hicache_needs_no_environment_of_its_own() -> None:
    assert prepare(SGLANG, "hicache").path == ()


def test_a_release_whose_installation_failed_is_installed_again(
    installs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(python: str, *arguments: str) -> None:
        Path(arguments[arguments.index("--target") + 1]).mkdir()
        raise SideError("the index is gone")

    with monkeypatch.context() as broken:
        broken.setattr(engines, "_pip", fail)
        with pytest.raises(SideError, match="the index is gone"):
            prepare(SGLANG, "0.5.23")
    assert not list((tmp_path / "cache" / "diff" / "sglang").iterdir())
    assert prepare(SGLANG, "0.5.23").name == "sglang 0.5.23"


def test_an_environment_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, SimpleNamespace(origin=None)):
        with monkeypatch.context() as patch:
            patch.setattr(engines.importlib.util, "find_spec", lambda _, found=found: found)
            with pytest.raises(SideError, match="torch must be installed here"):
                environment_of(prepare(SGLANG, "hicache"))


def test_a_release_without_the_package_is_refused(
    installs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_pip", lambda *_, **__: None)
    with pytest.raises(SideError, match=r"^sglang==0\.5\.1 contains no sglang$"):
        prepare(SGLANG, "0.5.1")


def test_a_folder_that_another_process_made_meanwhile_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def make(made: Path) -> None:
        made.mkdir()
        (made / "mine").touch()
        folder.mkdir()
        (folder / "theirs").touch()

    assert engines._made(folder, make, "making") == folder
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert engines._made(folder, make, "making") == folder  # as it is


def test_a_folder_that_cannot_be_moved_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def make(made: Path) -> None:
        made.mkdir()
        folder.touch()  # a file in its place

    with pytest.raises(OSError, match="made"):
        engines._made(folder, make, "making")


def test_slow_steps_of_preparation_are_announced_once(
    installs: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(SGLANG, "0.5.23")
    prepare(SGLANG, "0.5.23")
    assert capsys.readouterr().err.splitlines() == [
        "fetching sglang==0.5.23 ...",
        "making the environment of sglang (some minutes, once) ...",
    ]


def test_pip_runs_quietly_and_its_failure_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []
    endings = [(0, ""), (1, "WARNING: old\nERROR: no such x\nNOTE: new"), (1, "a\nlast"), (1, "")]

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        status, said = endings[len(asked) - 1]
        return subprocess.CompletedProcess(command, status, "", said)

    monkeypatch.setattr(engines.subprocess, "run", run)
    engines._pip("python", "--no-deps", "x==1", command="download")
    quiet = ["--quiet", "--disable-pip-version-check"]
    assert asked == [["python", "-m", "pip", "download", *quiet, "--no-deps", "x==1"]]
    for reason in ("no such x", "last", "pip gave no reason"):
        with pytest.raises(SideError, match=rf"^cannot install x==1: {reason}$"):
            engines._pip("python", "x==1")
    assert asked[1][3] == "install"


def test_a_side_gets_the_environment_of_this_process_and_its_own_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HICACHE_KEPT", "yes")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    launch = engines.Launch(name="x", interpreter="python", module="m", path=("/one", "/two"))
    found = environment_of(launch)
    assert found["HICACHE_KEPT"] == "yes"
    assert found["PYTHONHASHSEED"] == "0"
    assert found["PYTHONDONTWRITEBYTECODE"] == "1"
    assert found["PYTHONPATH"] == "/one:/two"


def test_engines_differ_in_storage_compat_preset_and_compiled_code() -> None:
    assert sorted(ENGINES) == ["sglang", "vllm"]
    vllm = ENGINES["vllm"]
    assert (SGLANG.has_storage, vllm.has_storage) == (True, False)
    assert (SGLANG.compat, vllm.compat) == ("sglang_0_5_23", "vllm_0_33")
    assert (SGLANG.python_only, vllm.python_only) == (False, True)
    for name, engine in ENGINES.items():
        assert engine.package == name


@pytest.mark.parametrize("folder", ["", "python", "src"])
def test_a_checkout_may_hold_its_package_in_a_folder(
    installs: list[tuple[str, ...]], tmp_path: Path, folder: str
) -> None:
    package = tmp_path / "mine" / folder / "sglang"
    package.mkdir(parents=True)
    with pytest.raises(SideError, match="give a checkout, a folder that contains sglang/, or"):
        prepare(SGLANG, str(tmp_path / "mine"))
    (package / "__init__.py").touch()
    assert prepare(SGLANG, str(tmp_path / "mine")).path == (str(package.parent),)


@pytest.mark.parametrize("spec", ["0", "0.5.23x/", "x0.5.23", "sglang-9.whl"])
def test_a_side_that_is_neither_a_release_nor_a_path_is_refused(
    installs: list[tuple[str, ...]], spec: str
) -> None:
    with pytest.raises(SideError, match="neither a release of sglang, nor hicache, nor a path"):
        prepare(SGLANG, spec)
    assert not installs
