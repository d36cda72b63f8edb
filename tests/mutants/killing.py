"""Lets the tests at mutants: each in a process of its own, forked when all tests are loaded.

A mutant lives in memory only. In a function, its code takes the place of the function's; what acts
when a module is imported is imported afresh, with all that depends on it. A failure ends it.
"""

import gc
import linecache
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.mutants.operators import Mutant
from tests.mutants.packages import ROOT
from tests.mutants.reach import Reach

PYTEST = ("-o", "addopts=", "-s", "-p", "no:terminal", "-p", "no:cacheprovider")
MEMORY_BYTES = 8 << 30  # a process may take so much
LOADING_S = 60
SLACK_S, SLACK = 5, 10  # a test may take so much, and so many times what it takes otherwise
FAILED, BROKEN = 1, 70  # exit statuses
KEPT = ("tests.mutants",)


class Fate(StrEnum):
    """What became of a mutant."""

    killed = "killed"
    timed_out = "timed out"
    survived = "survived"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A mutant, and the tests that it is shown to in this order.

    `afresh`: its module is imported again, for it acts at import.
    """

    mutant: Mutant
    tests: Sequence[str]
    afresh: bool


Tell = Callable[[Trial, Fate], object]


def judge(trials: Sequence[Trial], reach: Reach, jobs: int, tell: Tell) -> dict[Mutant, Fate]:
    """Try all mutants, `jobs` at a time; `tell` hears of each as soon as it is judged."""
    court = _Court(trials, reach, jobs, tell)
    files = {test.partition("::")[0]: None for trial in trials for test in trial.tests}
    if files and (status := pytest.main([*PYTEST, *files], plugins=[court])):
        sys.exit(f"pytest could not load the tests: exit status {status}")
    for trial in trials:
        if not trial.tests:
            court.conclude(trial, Fate.survived)
    return court.fates


class _Court:
    """A plugin of pytest: in place of the loop over tests, one over mutants."""

    def __init__(self, trials: Sequence[Trial], reach: Reach, jobs: int, tell: Tell) -> None:
        self.fates: dict[Mutant, Fate] = {}
        self._tell = tell
        self._waiting = [trial for trial in reversed(trials) if trial.tests]
        self._reach, self._jobs = reach, jobs
        self._running: dict[int, tuple[Trial, Path]] = {}  # by process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mutated = {str(ROOT / trial.mutant.path) for trial in self._waiting}
        functions = [f for f in gc.get_objects() if type(f) is FunctionType]
        self._functions = [f for f in functions if f.__code__.co_filename in mutated]
        gc.freeze()  # memory stays shared
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._jobs:
                self._start(self._waiting.pop(), session)
            process, status = os.wait()
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # servers that its tests started
            trial, directory = self._running.pop(process)
            self.conclude(trial, _fate(trial, os.waitstatus_to_exitcode(status), directory))
            shutil.rmtree(directory)
        return True

    def conclude(self, trial: Trial, fate: Fate) -> None:
        self.fates[trial.mutant] = fate
        self._tell(trial, fate)

    def _start(self, trial: Trial, session: pytest.Session) -> None:
        directory = Path(tempfile.mkdtemp(prefix="mutant-"))
        if process := os.fork():
            self._running[process] = trial, directory
            return
        status = BROKEN
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _limit(LOADING_S)
            witness = _Witness(trial.tests, self._reach, directory)
            if trial.afresh:
                status = _run_afresh(trial, witness)
            else:
                status = _run_loaded(trial, witness, session, self._functions)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


class _Witness:
    """A plugin for a mutant's process: its tests, a time limit, an end at a failure."""

    def __init__(self, tests: Sequence[str], reach: Reach, directory: Path) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._reach, self.directory = reach, directory

    def chosen(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        found = [item for item in items if item.nodeid in self._order]
        return sorted(found, key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = self.chosen(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        _limit(SLACK_S + SLACK * self._reach.seconds[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.fail_if(is_failure=report.failed)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.fail_if(is_failure=report.failed)

    def fail_if(self, *, is_failure: bool) -> None:
        if is_failure:
            os._exit(FAILED)


def _limit(limit_s: float) -> None:
    """Nobody handles these signals: one after so much processor time, one after a long wait."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.alarm(round(10 * limit_s))


def _run_loaded(
    trial: Trial, witness: _Witness, session: pytest.Session, functions: Sequence[FunctionType]
) -> int:
    """The tests as they are loaded, on the mutant's code; a failure does not come back."""
    path = ROOT / trial.mutant.path
    codes = _codes(compile(trial.mutant.applied(path.read_text()), str(path), "exec"))
    changed = [each for each in functions if each.__code__.co_filename == str(path)]
    for function in changed:
        code = codes.get(_place(function.__code__))
        if code is None or code.co_freevars != function.__code__.co_freevars:
            return _run_afresh(trial, witness)  # as when a `lambda` or `super()` is gone
        function.__code__ = code
    session.config._tmp_path_factory._basetemp = witness.directory
    session.config.pluginmanager.register(witness)
    items = witness.chosen(session.items)
    for item, following in zip(items, [*items[1:], None], strict=False):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return 0


def _run_afresh(trial: Trial, witness: _Witness) -> int:
    """Import the project and its tests again, the mutant among them."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
        if is_ours and not name.startswith(KEPT):
            del sys.modules[name]
    sys.meta_path.insert(0, _Mutated(trial.mutant))
    files = dict.fromkeys(test.partition("::")[0] for test in trial.tests)
    told = [*PYTEST, f"--basetemp={witness.directory}/tests", *files]
    status = pytest.main(told, plugins=[witness])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return 0
    # loading the tests, or what their conftest imports
    is_loading = status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    witness.fail_if(is_failure=is_loading)
    raise RuntimeError(f"pytest ended with {status}")


class _Mutated(MetaPathFinder, SourceLoader):
    """Finds one module, with a mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = ROOT / mutant.path
        self._name = mutant.path.removesuffix(".py").replace("/", ".")
        source = mutant.applied(self._path.read_text())
        self._source = source.encode()
        # Triton reads the text of kernels; an entry without a time is not compared with the file
        lines = source.splitlines(keepends=True)
        linecache.cache[str(self._path)] = len(source), None, lines, str(self._path)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self._name else None

    def get_filename(self, _: str) -> str:
        return str(self._path)

    def get_data(self, _: str) -> bytes:
        return self._source


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """All code inside a module's, by where it begins."""
    found = {_place(code): code}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _codes(inner)
    return found


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _fate(trial: Trial, status: int, directory: Path) -> Fate:
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return Fate.timed_out
    if status == FAILED or status < 0:
        return Fate.killed
    if status == 0:
        return Fate.survived
    sys.exit(f"the trial of {trial.mutant} broke:\n{(directory / 'log').read_text()}")
