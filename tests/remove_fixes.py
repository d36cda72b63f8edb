"""Take each fix out of the code, one at a time, and see which named test notices.

python -m tests.remove_fixes              all of them
python -m tests.remove_fixes --list
python -m tests.remove_fixes 003 004      those whose name begins so

Works on a copy of the source; ends with 1 if a removal goes unnoticed or cannot be made.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.cli.command import parser_of

ROOT = Path(__file__).parents[1]
FIXES = ROOT / "tests" / "fixes.diff"
# three failures are notice enough: a scenario that fails is made small, which takes a while
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines that are part of a fix, and what stood there without it."""

    path: str
    fix: str
    without: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The edits that make a fix, and who should notice when they are undone.

    `test`: a file and a word that the names of the tests share.
    """

    name: str
    test: tuple[str, str]
    edits: Sequence[Edit]


def read_removals() -> list[Removal]:
    """What `fixes.diff` says, after its first paragraph."""
    removals = []
    for block in FIXES.read_text().strip().split("\n\n")[1:]:
        head, *edits = block.split("\n--- ")
        name, test = head.split("\n")
        file, word = test.removeprefix("@ ").split(" ")
        removals.append(
            Removal(name=name.removeprefix("# "), test=(file, word), edits=list(map(_edit, edits)))
        )
    return removals


def _edit(text: str) -> Edit:
    path, *lines = text.split("\n")
    fix, without = ("\n".join(each[1:] for each in lines if each[0] == sign) for sign in "-+")
    return Edit(path=path, fix=fix, without=without)


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the removals and print one line each."""
    parser = parser_of("python -m tests.remove_fixes", __doc__)
    parser.add_argument("names", nargs="*", help="how names of removals begin; none: all")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args(arguments)
    chosen = [
        each for each in read_removals() if each.name.startswith(tuple(options.names or [""]))
    ]
    if options.list:
        for removal in chosen:
            print(f"{removal.name}: {removal.test[0]} -k '{removal.test[1]}'")
        return
    if not chosen:
        sys.stderr.write(f"no removal begins with {' or '.join(options.names)}; see --list\n")
        sys.exit(2)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "source"
        for name in ("hicache", "experiments", "tests", "conf"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for removal in chosen:
            verdict = try_removal(removal, copy)
            unnoticed += not verdict.startswith("noticed")
            print(f"{removal.name}: {verdict}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} removals are noticed")
    sys.exit(int(unnoticed > 0))


def try_removal(removal: Removal, copy: Path) -> str:
    """Take a fix out of a copy of the source, run its tests, put it back; what they said."""
    sources = {edit.path: (copy / edit.path).read_text() for edit in removal.edits}
    for edit in removal.edits:
        if (count := sources[edit.path].count(edit.fix)) != 1:
            return f"CANNOT BE MADE: the fix stands {count} times in {edit.path}"
    if run_tests(removal, copy):
        return f"NO TEST: {removal.test[0]} -k '{removal.test[1]}' does not pass with the fix"
    for edit in removal.edits:
        path = copy / edit.path
        path.write_text(path.read_text().replace(edit.fix, edit.without))
    try:
        failed = run_tests(removal, copy)
    finally:
        for path, source in sources.items():
            (copy / path).write_text(source)
    return f"noticed by {', '.join(failed)}" if failed else f"UNNOTICED by {removal.test[1]}"


def run_tests(removal: Removal, copy: Path) -> list[str]:
    """The names of the tests that failed, or of the file if none could be run."""
    file, words = removal.test
    told = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*PYTEST, file, "-k", words],
        cwd=copy,
        env={**os.environ, **told, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they load slowly
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    names = [line.split(" ")[1].rpartition("::")[2].partition("[")[0] for line in lines]
    return list(dict.fromkeys(names)) or [file]


if __name__ == "__main__":
    main()
