"""The token hit rate that a workload gives at every cache capacity, without simulating time.

python -m experiments.studies.capacity
python -m experiments.studies.capacity workload=weka_agentic model=qwen3_8b

One pass over the requests gives the hit rate of LRU as a function of capacity. Belady's MIN gives
an upper bound. The cache has one tier: its hit rate is that of a hierarchy whose largest tier has
this capacity. The model must have full attention only; `hicache size` takes any model.
"""

import sys

from rich import box
from rich.table import Table

from hicache.cache.kinds import FULL, model_kinds
from hicache.cli.command import in_one_sentence
from hicache.cli.console import console
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig
from hicache.models import GIB
from hicache.workload.oracle import infinite, lru_depths, min_hits, visits_of
from hicache.workload.workload import load_workload

CAPACITIES_GIB = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Mooncake (FAST'25): 3 M tokens hit under half of the maximum, 50 M nearly all of it
PUBLISHED_TOKENS = (3_000_000, 50_000_000)


def hit_rates(config: ExperimentConfig) -> list[tuple[float, float, float]]:
    """Return the token hit rates of LRU and MIN by capacity in tokens; the last has no limit.

    Raises:
        ValueError: the model has sliding windows or Mamba states.
    """
    model, page = config.model, config.cache.page_size
    sizes = model_kinds(model, page, 1).page_bytes
    if any(sizes[FULL + 1 :]):
        raise ValueError(f"{model.name} has windows or states: use hicache size model={model.name}")
    workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
    visits = visits_of(workload.requests, page)
    depths = lru_depths(visits)
    pages = [int(gib * GIB) // sizes[FULL] for gib in CAPACITIES_GIB]
    pages += [tokens // page for tokens in PUBLISHED_TOKENS]
    found: list[tuple[float, int, int]] = [
        (count * page, int((depths <= count).sum()) * page, min_hits(visits, count))
        for count in sorted(pages)
    ]
    found.append((float("inf"), len(depths) * page, infinite(visits)))
    return [
        (tokens, lru / visits.prompt_tokens, best / visits.prompt_tokens)
        for tokens, lru, best in found
    ]


def main() -> None:
    config = config_of("experiment=capacity", *sys.argv[1:])
    token_gib = config.model.full_token_bytes / GIB
    table = Table("GiB", "M tokens", "LRU", "MIN", box=box.SIMPLE_HEAD)
    for tokens, lru, best in hit_rates(config):
        table.add_row(
            f"{tokens * token_gib:,.0f}", f"{tokens / 1e6:,.2f}", f"{lru:.3f}", f"{best:.3f}"
        )
    console().print(f"{config.workload.kind}, {config.model.name}", table)


if __name__ == "__main__":
    with in_one_sentence():
        main()
