"""Hits of an infinite cache with the key rules of speculative decoding, for the two real traces.

python -m experiments.studies.speculation

Requests come one after the other, so that no time and no memory matters: a page is a hit if an
earlier request had it. The table has the token hit rates, the computed tokens as a multiple of
those with plain keys, and the share of hits that bigrams shorten. Table and figure are written to
`outputs/speculation` (docs/speculation.md).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from hicache.cli.command import in_one_sentence, parser_of
from hicache.request import Request
from hicache.results.figures import save
from hicache.runs.schema import config_of
from hicache.workload.page_numbers import page_numbers
from hicache.workload.workload import load_workload

OUT = Path("outputs", "speculation")
TRACES = {
    "conversation": ("workload=mooncake_conversation",),
    # the longest prompts of 120 sessions
    "agents": ("workload=weka_agentic", "workload.limit=null", "workload.max_context=131072"),
}
SIZES = (16, 64, 128, 528, 784, 1536, 1648)  # pages of SGLang, and blocks of vLLM
RULES = ("token", "bigram", "drop_block")


class Hits(NamedTuple):
    trace: str
    tokens: str  # `workload.tokens`
    size: int
    rate: dict[str, float]  # by rule
    shortened: dict[str, float]  # share of the hits with plain keys that a rule shortens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.studies.speculation", __doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="directory of table and figure")
    out = parser.parse_args(arguments).out
    with in_one_sentence():
        found = list(measure())
    out.mkdir(parents=True, exist_ok=True)
    text = table(found)
    (out / "infinite.md").write_text(text)
    draw([each for each in found if each.tokens == "literal"], out / "infinite.png")
    print(text)
    print(out)


def measure() -> Iterator[Hits]:
    for trace, overrides in TRACES.items():
        for tokens in ("literal", "reconstructed"):
            config = config_of(*overrides, f"workload.tokens={tokens}")
            workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
            total = sum(request.prompt_len for request in workload.requests)
            for size in SIZES:
                hits = {rule: hit_lens(workload.requests, size, rule) for rule in RULES}
                plain = hits["token"]
                rates = {rule: float(lens.sum()) / total for rule, lens in hits.items()}
                shares = {
                    rule: float(((lens < plain)[plain > 0]).mean()) for rule, lens in hits.items()
                }
                yield Hits(trace, tokens, size, rates, shares)


def hit_lens(
    requests: Sequence[Request], size: int, rule: str
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the hit tokens of each request in a cache that forgets nothing."""
    overlap = int(rule == "bigram")
    pages = page_numbers(requests, size, overlap)
    seen = np.zeros(
        1 + max(int((each.starts + each.counts).max(initial=0)) for each in pages.values()), bool
    )
    lens = np.zeros(len(requests), np.int64)
    for place, request in enumerate(requests):
        numbers = np.frombuffer(pages[request.id].to_bytes(), np.int32)
        most = max(request.prompt_len - 1 - overlap, 0) // size
        flags = seen[numbers[:most]]
        count = most if flags.all() else int(flags.argmin())
        lens[place] = max(count - (rule == "drop_block"), 0) * size
        # the last token of an answer has no KV
        seen[numbers[: max(request.prompt_len + request.output_len - 1 - overlap, 0) // size]] = (
            True
        )
    return lens


def table(found: Sequence[Hits]) -> str:
    lines = [
        "| trace | tokens | page | plain | bigram | block dropped | computed, bigram |"
        " computed, dropped | shortened by bigrams |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        rates = [f"{each.rate[rule]:.4f}" for rule in RULES]
        more = [f"{(1 - each.rate[rule]) / (1 - each.rate['token']):.3f}" for rule in RULES[1:]]
        cells = (
            each.trace,
            each.tokens,
            str(each.size),
            *rates,
            *more,
            f"{each.shortened['bigram']:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Hits], path: Path) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, trace in zip(figure.subplots(1, 2), TRACES, strict=True):
        own = [each for each in found if each.trace == trace]
        for rule, marker in (("bigram", "o"), ("drop_block", "s")):
            more = [(1 - each.rate[rule]) / (1 - each.rate["token"]) for each in own]
            axes.plot([each.size for each in own], more, marker=marker, label=rule)
        axes.set(title=trace, xscale="log", xlabel="tokens of a page or block")
        axes.set_ylabel("computed tokens ÷ those with plain keys")
        axes.set_xticks(SIZES[:-2] + SIZES[-1:], SIZES[:-2] + SIZES[-1:])
        axes.minorticks_off()
        axes.legend()
    save(figure, path)


if __name__ == "__main__":
    main()
