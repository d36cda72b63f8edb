"""A read from storage that SGLang cannot use: shorter than a window, below a node.

python -m experiments.diff.short_read 0.5.23 hicache

A model with a window of 1,024 tokens, pages of 64. Two prompts share 2,048 tokens. The rest of the
first (512 tokens) is evicted from device and host and remains in storage, pages and window. When
the first prompt comes again, the device holds the shared part with its window. The rest is read: it
is longer than the minimum of a read (256 tokens) and shorter than a window.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.diff.engines import ENGINES, OURS, prepare
from experiments.diff.explain import hits_in_words, spans_in_words
from experiments.diff.process import SideProcess
from experiments.diff.protocol import Call, Outcome, Pools, SideError, Tokens
from hicache.cli.command import parser_of

WINDOW = 1024
POOLS = Pools(
    device_tokens=8192,
    host_tokens=8192,
    max_len=8192,
    num_running=1,
    window_len=WINDOW,
    swa_tokens=8192,
)
SHARED, REST = 2 * WINDOW, WINDOW // 2


def main() -> None:
    parser = parser_of("python -m experiments.diff.short_read", __doc__)
    parser.add_argument(
        "sides", nargs="+", help="releases, checkouts or wheels to test, or hicache"
    )
    options = parser.parse_args()
    for spec in options.sides:
        try:
            launch = prepare(ENGINES["sglang"], spec)
            if spec == OURS:  # with the preset that reads as SGLang does
                launch = replace(launch, options={"compat": "reports"})
            with (
                tempfile.TemporaryDirectory() as folder,
                SideProcess(launch, POOLS, Path(folder) / "side.log") as side,
            ):
                side.about()
                print("\n".join(tell(side)))
        except SideError as error:
            sys.exit(f"experiments.diff.short_read: {error}")


def tell(side: SideProcess) -> list[str]:
    shared = run_of(0, SHARED)
    first = np.concatenate([shared, run_of(1, REST), run_of(2, 2)])
    other = np.concatenate([shared, run_of(3, REST), run_of(4, 2)])
    story = [("the first prompt", first), ("another that begins like it", other)]
    for number in range(4):  # they cause evictions, and the shared part stays in use
        story += [
            (f"something else ({number})", run_of(10 + number, 2 * WINDOW)),
            ("the other again", other),
        ]
    story.append(("the first prompt again", first))
    lines = [f"{side.name}:"]
    for number, (name, prompt) in enumerate(story):
        if name == "the first prompt again":
            held = side.probe(first)
            lines += [f"  held of it: {part} {spans_in_words(held[part])}" for part in sorted(held)]
        outcome = admit(side, number, prompt)
        lines.append(f"  {name}, {len(prompt):,} tokens: hit {hits_in_words(outcome)}")
    read = outcome.counts.get("moved/full/read", 0)
    windows = outcome.counts.get("moved/swa/read", 0)
    used = outcome.hits.storage
    lines.append(f"  read for it: {read:,} tokens of KV, {windows:,} of window; used: {used:,}")
    return lines


def admit(side: SideProcess, number: int, prompt: Tokens) -> Outcome:
    tokens = np.concatenate([prompt, run_of(100 + number, 2)])
    finished: list[Call] = [("finish", number - 1)] if number else []
    side.ask([*finished, ("admit", number, tokens, len(prompt))])
    return side.take_outcome()


def run_of(name: int, count: int) -> Tokens:
    return np.arange(name * 10_000, name * 10_000 + count, dtype=np.int32)


if __name__ == "__main__":
    main()
