"""`python -m tests.mutants`: how many small mistakes in a package the tests notice."""

import argparse
import random
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.killing import Fate, Trial, judge
from tests.mutants.operators import Mutant, mutants
from tests.mutants.packages import PACKAGES, ROOT, modules
from tests.mutants.reach import IMPORT, Reach, reach

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


def main() -> None:
    told = _parser().parse_args()
    commit = _commit()  # it may be another one when the mutants are judged
    seed = int(commit, 16) if told.seed is None else told.seed
    found = reach(told.tests, told.jobs, fresh=told.fresh)
    equivalent = {(m["path"], m["before"], m["after"]) for m in equivalents()}
    trials, rows = [], []
    for package in told.package or PACKAGES:
        drawn = draw(package, told.count, seed)
        same = [m for m in drawn if (m.path, *m.change(_source(m))) in equivalent]
        rows.append((package, drawn, same))
        trials += [trial(m, found, told.budget) for m in drawn if m not in same]
    fates = judge(trials, found, told.jobs, _tell)
    print(f"\nOf commit {commit[:12]}, seed {seed}:\n")
    print("| package | mutants | killed | timed out | survived | equivalent | noticed |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for package, drawn, same in rows:
        print(_row(package, [fates[m] for m in drawn if m not in same], len(same)))


def draw(package: str, count: int, seed: int) -> list[Mutant]:
    """`count` of a package's mutants, each of another place or kind; the same ones for a seed."""
    every = [m for path in modules(package) for m in mutants(_name(path), path.read_text())]
    random.Random(f"{package} {seed}").shuffle(every)
    places = {(m.path, m.start, m.end, m.operator): m for m in reversed(every)}
    return list(places.values())[:count]


def trial(mutant: Mutant, found: Reach, budget_s: float) -> Trial:
    """Tests that run it, for at most `budget_s` of processor time together.

    One that acts at import is shown to tests whose file imports its module, and to others that run
    anything of it; of a module that has nothing to run, which is data alone, to any.
    """
    reached = found.tests_of(mutant.path, mutant.lines)
    # Triton compiles the text of a kernel, so another code object in it would change nothing
    afresh = mutant.at_import or IMPORT in reached or "@triton.jit" in _source(mutant)
    if mutant.at_import:
        reached = reached | _importing(mutant.path, found)
    near = in_turn(reached - {IMPORT}, found.seconds)
    all_of_it = found.tests_of(mutant.path, None) - {IMPORT} if afresh else set()
    if afresh and not all_of_it:
        all_of_it = set(found.seconds) - {IMPORT}
    far = in_turn(all_of_it - reached, found.seconds)
    tests, spent_s = [], 0.0
    for test in [*near, *far]:
        spent_s += found.seconds[test]
        if tests and spent_s > budget_s:
            break
        tests.append(test)
    return Trial(mutant=mutant, tests=tests, afresh=afresh)


def _importing(path: str, found: Reach) -> set[str]:
    module = path.removesuffix(".py").replace("/", ".")
    files = {test.partition("::")[0] for test in found.seconds} - {IMPORT}
    naming = {file for file in files if f"from {module} import" in (ROOT / file).read_text()}
    return {test for test in found.seconds if test.partition("::")[0] in naming}


def in_turn(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """The quickest first, but one variant of every test before a second one of any."""
    turns: Counter[str] = Counter()
    places = {}
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        name = test.partition("[")[0]
        places[test] = turns[name], seconds[test]
        turns[name] += 1
    return sorted(places, key=places.__getitem__)


def _row(package: str, judged: Sequence[Fate], equivalent: int) -> str:
    fates = Counter(judged)
    noticed = 1 - fates[Fate.survived] / max(len(judged), 1)
    numbers = [len(judged) + equivalent, *(fates[fate] for fate in Fate), equivalent]
    return f"| {package} | {' | '.join(map(str, numbers))} | {noticed:.1%} |"


def _tell(judged: Trial, fate: Fate) -> None:
    """A dot for a mutant that was noticed, and all about one that was not."""
    if fate is not Fate.survived:
        print(".", end="", flush=True)
        return
    mutant = judged.mutant
    before, after = mutant.change(_source(mutant))
    tests = f"{len(judged.tests)} tests" if judged.tests else "no test runs it"
    where = f"{mutant.path}:{mutant.lines[0]} {mutant.operator}"
    print(f"\n{where} ({tests})\n  - {before}\n  + {after}", flush=True)


def equivalents() -> list[dict[str, str]]:
    """Mutants that nobody could tell from the original, each with a line of proof."""
    return tomllib.loads(EQUIVALENT.read_text())["mutant"]


def _source(mutant: Mutant) -> str:
    return (ROOT / mutant.path).read_text()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _commit() -> str:
    told = ["git", "rev-parse", "HEAD"]
    return subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="default: all")
    parser.add_argument("--count", type=int, default=120, help="mutants a package")
    parser.add_argument("--seed", type=int, help="default: from the commit's hash")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests a mutant")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="which tests; default: all")
    parser.add_argument("--fresh", action="store_true", help="record anew which lines tests run")
    return parser


if __name__ == "__main__":
    main()
