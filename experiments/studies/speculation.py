"""Hits of an infinite cache with the key rules of speculative decoding, for the two real traces.

python -m experiments.studies.speculation

Requests come one after the other, so that no time and no memory matters: a page is a hit if an
earlier request had it. The table has the token hit rates, the computed tokens as a multiple of
those with plain keys, and the share of hits that bigrams shorten. Table and figure are written to
`outputs/speculation` (docs/speculation.md).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hicache.cli.command import in_one_sentence, parser_of
from hicache.results.figures import save
from hicache.runs.schema import config_of
from hicache.workload.reuse import reuse
from hicache.workload.workload import load_workload

OUT = Path("outputs", "speculation")
TRACES = {
    "conversation": ("workload=mooncake_conversation",),
    # the longest prompts of 120 sessions
    "agents": ("workload=weka_agentic", "workload.limit=null", "workload.max_context=131072"),
}
SIZES = (16, 64, 128, 528, 784, 1536, 1648)  # pages of SGLang, and blocks of vLLM


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.studies.speculation", __doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="directory of table and figure")
    out = parser.parse_args(arguments).out
    with in_one_sentence():
        found = pd.DataFrame(measure())
    for rule in ("bigram", "dropped"):
        found[f"computed, {rule}"] = (1 - found[rule]) / (1 - found.plain)
    out.mkdir(parents=True, exist_ok=True)
    text = found.to_markdown(index=False, floatfmt=".4f")
    (out / "infinite.md").write_text(f"{text}\n")
    draw(found[found.tokens == "literal"], out / "infinite.png")
    print(text, out, sep="\n\n")


def measure() -> Iterator[dict[str, str | int | float]]:
    for trace, overrides in TRACES.items():
        for tokens in ("literal", "reconstructed"):
            config = config_of(*overrides, f"workload.tokens={tokens}")
            workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
            total = sum(request.prompt_len for request in workload.requests)
            for size in SIZES:
                used = [reuse(workload.requests, size, overlap) for overlap in (0, 1)]
                plain, bigram = (each.lru(each.full_pages) for each in used)
                hits = {"plain": plain, "bigram": bigram, "dropped": np.maximum(plain - 1, 0)}
                rates = {rule: float(pages.sum()) * size / total for rule, pages in hits.items()}
                shortened = float((bigram < plain)[plain > 0].mean())
                row = {"trace": trace, "tokens": tokens, "page": size}
                yield row | rates | {"shortened by bigrams": shortened}


def draw(found: pd.DataFrame, path: Path) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, trace in zip(figure.subplots(1, 2), TRACES, strict=True):
        own = found[found.trace == trace].set_index("page")
        for rule, marker in (("bigram", "o"), ("dropped", "s")):
            axes.plot(own[f"computed, {rule}"], marker=marker, label=rule)
        axes.set(title=trace, xscale="log", xlabel="tokens of a page or block")
        axes.set_ylabel("computed tokens ÷ those with plain keys")
        axes.set_xticks(SIZES[:-2] + SIZES[-1:], SIZES[:-2] + SIZES[-1:])
        axes.minorticks_off()
        axes.legend()
    save(figure, path)


if __name__ == "__main__":
    main()
