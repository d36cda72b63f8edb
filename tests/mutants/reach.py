"""Which tests run which lines, and how long each test takes: recorded once for a set of tests.

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
from pathlib import Path

import pytest

from tests.mutants.packages import PACKAGES, ROOT

CACHE = ROOT / ".mutants"
IMPORT = ""  # the context of what runs while no test does
PARTS_ENV = "MUTANTS_PARTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """`seconds`: of the processor, a test and its fixtures. `lines`: path → line → tests."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def tests_of(self, path: str, lines: Sequence[int] | None) -> set[str]:
        """The tests that run the first of `lines` that any runs; None: anything of the module."""
        of_file = self.lines.get(path, {})
        if lines is None:
            return {test for tests in of_file.values() for test in tests}
        return next((set(of_file[line]) for line in lines if line in of_file), set())


def reach(tests: Sequence[str], jobs: int) -> Reach:
    """What `tests` (arguments of pytest) reach, recorded unless these very files were before."""
    path = CACHE / f"reach-{_digest(tests)}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(_recorded(tests, jobs)))
    found = json.loads(path.read_text())
    names = list(found["seconds"])
    lines = {
        name: {int(line): [names[index] for index in of] for line, of in of_file.items()}
        for name, of_file in found["lines"].items()
    }
    return Reach(seconds=found["seconds"], lines=lines)


def _digest(tests: Sequence[str]) -> str:
    hashed = hashlib.sha256(" ".join(tests).encode())
    for top in ("hicache", "tests", "conf", "experiments"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".py", ".yaml") and "mutants" not in path.parts:
                hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def _recorded(tests: Sequence[str], jobs: int) -> dict[str, object]:
    """Run the tests in `jobs` processes, and put together what each wrote."""
    parts = CACHE / f"parts-{os.getpid()}"
    parts.mkdir()
    told = ["-q", "-p", "tests.mutants.reach", *tests]
    told += ["-n", str(jobs), "--dist", "loadscope"] if jobs > 1 else []
    command = [sys.executable, "-m", "pytest", *told]
    if subprocess.run(command, cwd=ROOT, env={**os.environ, PARTS_ENV: str(parts)}).returncode:
        sys.exit("mutants say nothing while the tests fail")
    seconds: dict[str, float] = {IMPORT: 0.0}
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for part in parts.glob("*.json"):
        found = json.loads(part.read_text())
        seconds.update(found["seconds"])
        index = {name: number for number, name in enumerate(seconds)}
        for name, of_file in found["lines"].items():
            for line, names in of_file.items():
                lines[name][line].update(index[test] for test in names)
    ordered = {name: {line: sorted(t) for line, t in of.items()} for name, of in lines.items()}
    shutil.rmtree(parts)
    return {"seconds": seconds, "lines": ordered}


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
        contexts = {test: [test, *wide] for test, wide in self._fixtures.items()}
        tests_of = defaultdict(list)
        for test, names in contexts.items():
            for name in names:
                tests_of[name].append(test)
        tests_of[IMPORT] = [IMPORT]
        data, lines = self._coverage.get_data(), {}
        for path in data.measured_files():
            lines[str(Path(path).relative_to(ROOT))] = {
                line: sorted({test for name in names for test in tests_of[name]})
                for line, names in data.contexts_by_lineno(path).items()
            }
        seconds = {t: sum(self._seconds[name] for name in names) for t, names in contexts.items()}
        found = json.dumps({"seconds": seconds, "lines": lines})
        (self._parts / f"{os.getpid()}.json").write_text(found)


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
