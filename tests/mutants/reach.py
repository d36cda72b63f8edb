"""Which tests run which lines, and how long each test takes; recorded once and kept.

A line counts for a test when the test, a fixture of it or a helper remembered by `functools.cache`
runs it. What runs in a process of its own is not seen.
"""

import functools
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from tests.mutants.packages import PACKAGES, ROOT, modules

CACHE = ROOT / ".mutants"
IMPORT = ""  # the context of what runs while no test does
PARTS_ENV = "MUTANTS_PARTS"
FEW = 8  # test files that are not worth a second process
Recorded = tuple[float, dict[str, list[int]]]  # seconds of a test; path → lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """`seconds`: of the processor, a test and its fixtures. `lines`: path → line → tests."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]

    def tests_of(self, path: str, lines: Sequence[int] | None) -> set[str]:
        """The tests that run the first of `lines` that any runs; None: anything of the module."""
        of_file = self.lines.get(path, {})
        if lines is None:
            return {test for tests in of_file.values() for test in tests}
        return next((of_file[line] for line in lines if line in of_file), set())


def reach(tests: Sequence[str], jobs: int, *, fresh: bool = False) -> Reach:
    """What the test files among `tests` reach; recorded are those that are new or have changed.

    Where the project has changed since, lines stand for those that took their place. `fresh`:
    record all of it again, as after a change of helpers.
    """
    path = CACHE / "reach.json"
    known = {"files": {}, "sources": {}, "tests": {}}
    if path.exists() and not fresh:
        known = json.loads(path.read_text())
    files = {str(file.relative_to(ROOT)): _digest(file) for file in _test_files(tests)}
    changed = [file for file, digest in files.items() if known["files"].get(file) != digest]
    sources = {str(p.relative_to(ROOT)): p.read_text() for of in PACKAGES for p in modules(of)}
    found = _recorded(changed, jobs) if changed else {}
    moved = {
        name: _moved(known["sources"].get(name, ""), source) for name, source in sources.items()
    }
    for test, (seconds, lines) in known["tests"].items():
        file = test.partition("::")[0]
        if test == IMPORT or (file not in changed and (ROOT / file).exists()):
            kept = {name: _through(moved[name], of) for name, of in lines.items() if name in moved}
            again = found[test][1] if test in found else {}  # what is imported
            found[test] = seconds, {name: _union(kept, again, name) for name in {*kept, *again}}
    known = {"files": known["files"] | files, "sources": sources, "tests": found}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known))
    return _reach_of({t: of for t, of in found.items() if t.partition("::")[0] in (IMPORT, *files)})


def _reach_of(found: dict[str, Recorded]) -> Reach:
    by_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for test, (_, lines) in found.items():
        for name, of_file in lines.items():
            for line in of_file:
                by_line[name][line].add(test)
    return Reach(seconds={test: seconds for test, (seconds, _) in found.items()}, lines=by_line)


def _test_files(tests: Sequence[str]) -> list[Path]:
    found = {p for name in tests for p in [ROOT / name, *(ROOT / name).rglob("test_*.py")]}
    return sorted(path for path in found if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _moved(old: str, new: str) -> dict[int, list[int]] | None:
    """Line → where it is now, or what stands there now; None: all are where they were."""
    if old == new:
        return None
    moved: dict[int, list[int]] = defaultdict(list)
    matcher = SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        for index in range(i, i_end):
            moved[index + 1] += [j + index - i + 1] if kind == "equal" else range(j + 1, j_end + 1)
        if kind == "insert":
            moved[i] += range(j + 1, j_end + 1)  # what is new belongs to the line before
    return moved


def _through(moved: dict[int, list[int]] | None, lines: list[int]) -> list[int]:
    return lines if moved is None else sorted({now for line in lines for now in moved[line]})


def _union(one: dict[str, list[int]], other: dict[str, list[int]], name: str) -> list[int]:
    return sorted({*one.get(name, ()), *other.get(name, ())})


def _recorded(files: Sequence[str], jobs: int) -> dict[str, Recorded]:
    """Run the tests in `jobs` processes, and put together what each wrote."""
    parts = CACHE / f"parts-{os.getpid()}"
    parts.mkdir(parents=True)
    told = ["-q", "-p", "tests.mutants.reach", f"--basetemp={parts / 'tests'}", *files]
    if jobs > 1 and len(files) > FEW:
        told += ["-n", str(jobs), "--dist", "loadscope"]
    command = [sys.executable, "-m", "pytest", *told]
    if subprocess.run(command, cwd=ROOT, env={**os.environ, PARTS_ENV: str(parts)}).returncode:
        sys.exit("mutants say nothing while tests fail")
    found: dict[str, Recorded] = {}
    for part in parts.glob("*.json"):
        found |= json.loads(part.read_text())
    shutil.rmtree(parts)
    return found


class Recorder:
    """Tells coverage whose work runs: a test's, or a fixture's of wider scope."""

    def __init__(self, parts: Path) -> None:
        from coverage import Coverage  # wanted only here

        self._parts = parts
        mutated = [str(ROOT / pattern) for patterns in PACKAGES.values() for pattern in patterns]
        self._coverage = Coverage(data_file=None, include=mutated)
        self._coverage.start()
        self._context = IMPORT
        self._seconds: dict[str, float] = defaultdict(float)  # of a context
        self._fixtures: dict[str, list[str]] = {}  # test → contexts of its fixtures
        self._since = time.process_time()

    def _switch(self, context: str) -> str:
        """Whose the time and the lines are from here on; says whose they were."""
        before, now = self._context, time.process_time()
        self._seconds[before] += now - self._since
        self._context, self._since = context, now
        self._coverage.switch_context(context)
        return before

    def pytest_collection_finish(self) -> None:
        self._remembering = _remembering()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for function in self._remembering:
            function.cache_clear()
        self._switch(item.nodeid)
        yield
        self._switch(IMPORT)
        wide = [d for ds in item._fixtureinfo.name2fixturedefs.values() for d in ds]
        self._fixtures[item.nodeid] = [_name_of(d) for d in wide if d.scope != "function"]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(_name_of(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)
            self._remembering = _remembering()

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = defaultdict(dict)  # context → path → lines
        for path in data.measured_files():
            name = str(Path(path).relative_to(ROOT))
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in contexts:
                    lines[context].setdefault(name, []).append(line)
        found = {IMPORT: (0.0, lines[IMPORT])}
        for test, wide in self._fixtures.items():
            of_test: dict[str, set[int]] = defaultdict(set)
            for context in (test, *wide):
                for name, of_file in lines[context].items():
                    of_test[name].update(of_file)
            seconds = sum(self._seconds[context] for context in (test, *wide))
            found[test] = seconds, {name: sorted(of) for name, of in of_test.items()}
        (self._parts / f"{os.getpid()}.json").write_text(json.dumps(found))


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of pytest: record, but not in the process that only hands out tests."""
    if PARTS_ENV in os.environ and not config.getoption("numprocesses", default=None):
        config.pluginmanager.register(Recorder(Path(os.environ[PARTS_ENV])))


def _name_of(fixture: pytest.FixtureDef[object]) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def _remembering() -> list[Callable[..., object]]:
    """The project's functions that remember their results, wherever they are."""
    caches = (f for f in gc.get_objects() if type(f) is functools._lru_cache_wrapper)
    return [f for f in caches if str(f.__module__).split(".")[0] in ("hicache", "tests")]
