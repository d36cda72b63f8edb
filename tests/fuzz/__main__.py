"""Try scenarios by hand.

python -m tests.fuzz 0/17                               one, by its seed and number
python -m tests.fuzz 0/0-199                            many, in two processes
python -m tests.fuzz --limit 9 kinds=all seed=1         plain but for these choices, nine requests
"""

import argparse
import sys

from tests.fuzz.scenario import PLAIN
from tests.fuzz.shrink import Finding, examine
from tests.fuzz.survey import Survey, numbered, survey


def main() -> int:
    """Print what is found as it is found; 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="*", help="seed/number, seed/first-last or knob=value")
    parser.add_argument("--limit", type=int, help="requests")
    args = parser.parse_args()
    names = [name for word in args.scenario if "=" not in word for name in named(word)]
    choices = dict(PLAIN)
    for word in args.scenario:
        knob, equals, value = word.partition("=")
        if equals:
            if knob not in PLAIN:
                parser.error(f"there is no {knob}; scenarios differ in {', '.join(PLAIN)}")
            choices[knob] = value
    if not names:
        found = examine("plain", choices, args.limit)
        print(found if isinstance(found, Finding) else "nothing is wrong")
        return int(isinstance(found, Finding))
    visits = []
    for visit in survey(names):
        visits.append(visit)
        if visit.finding is not None:
            print(visit.finding, flush=True)
    result = Survey(visits=visits)
    print(result)
    return int(bool(result.findings))


def named(word: str) -> list[str]:
    """The scenarios of `seed/number` or `seed/first-last`."""
    seed, numbers = word.split("/")
    first, _, last = numbers.partition("-")
    return numbered(int(seed), range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    sys.exit(main())
