"""Rewrite the golden summaries and print the keys that changed.

HICACHE_DATA=DIR python -m tests.golden
"""

from tests.golden import CONFIGURATIONS, SUMMARIES, changes, name_rules, read, summary_of, write


def main() -> None:
    """Run every configuration, print what changed and write the summaries."""
    before = read() if SUMMARIES.exists() else {}
    after = {}
    for name in CONFIGURATIONS:
        after[name] = summary_of(name)
        changed = changes(before.get(name, {}), after[name])
        print(f"{name}: {len(changed)} of {len(after[name])} keys changed", flush=True)
        if name in before:
            print(*(f"  {line}" for line in changed), sep="\n")
    write(after)
    name_rules()


if __name__ == "__main__":
    main()
