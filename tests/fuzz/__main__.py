"""Try scenarios by hand.

python -m tests.fuzz 0/17                               one, by its seed and number
python -m tests.fuzz 0/0-199                            many, in two processes
python -m tests.fuzz 0/0-199 roles=one_each              many, with a choice that is not drawn
python -m tests.fuzz --limit 9 kinds=all seed=1         plain but for these choices, nine requests
"""

import argparse
import sys

from tests.fuzz.scenario import choices_of
from tests.fuzz.shrink import Finding, examine, try_all


def main() -> int:
    """Print each finding when it is found; return 1 if there is any, otherwise 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="*", help="seed/number, seed/first-last or knob=value")
    parser.add_argument("--limit", type=int, help="requests")
    args = parser.parse_args()
    words = [word for word in args.scenario if "=" in word]
    names = []
    for word in (each for each in args.scenario if "=" not in each):
        seed, numbers = word.split("/")
        first, _, last = numbers.partition("-")
        names += [f"{seed}/{number}" for number in range(int(first), int(last or first) + 1)]
    choices = choices_of(words)  # also refuses unknown words
    fixed = dict(word.split("=", 1) for word in words)
    tried = try_all(names, fixed) if names else [examine("plain", choices, args.limit)]
    num_findings = 0
    for found in tried:
        if isinstance(found, Finding):
            num_findings += 1
            print(found, flush=True)
    print(f"{len(names) or 1} scenarios, {num_findings} findings")
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())
