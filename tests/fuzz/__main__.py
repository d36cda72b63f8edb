"""Try scenarios by hand.

python -m tests.fuzz 0/17                               one, by its seed and number
python -m tests.fuzz 0/0-199                            many, in two processes
python -m tests.fuzz --limit 9 kinds=all seed=1         plain but for these choices, nine requests
"""

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.fuzz.scenario import PLAIN, plan_of
from tests.fuzz.shrink import Finding, examine, find

WORKERS = 2


def main() -> int:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", nargs="*", help="seed/number, seed/first-last or knob=value")
    parser.add_argument("--limit", type=int, help="requests")
    parser.add_argument("--show", action="store_true", help="the configuration, and run nothing")
    args = parser.parse_args()
    names = [name for word in args.scenario if "/" in word for name in numbered(word)]
    choices = dict(PLAIN) | dict(word.split("=", 1) for word in args.scenario if "/" not in word)
    if args.show:
        print(plan_of(choices, args.limit).config)
        return 0
    found = _findings(names) if names else [examine("plain", choices, args.limit)]
    causes: Counter[str] = Counter()
    for finding in filter(None, found):
        causes[finding.error.split(":")[0]] += 1
        print(finding, flush=True)
    print(f"{max(len(names), 1)} scenarios, {causes.total()} findings {dict(causes)}")
    return 1 if causes else 0


def numbered(word: str) -> list[str]:
    """The scenarios that `seed/first-last` names."""
    seed, numbers = word.split("/")
    first, _, last = numbers.partition("-")
    return [f"{seed}/{number}" for number in range(int(first), int(last or first) + 1)]


def _findings(names: list[str]) -> list[Finding | None]:
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        return list(workers.map(find, names, chunksize=5))


if __name__ == "__main__":
    sys.exit(main())
