"""Error of logits after pages and states made a lossy round trip from the device to the host.

    python -m experiments.studies.restore_error

The program computes a prompt, moves pages or states to the host and back, and computes what
follows. It compares the logits with those of a run without round trips. `moves` counts round trips
in a row; `turns` counts round trips with a page of tokens in between. A cell of the table shows the
largest difference of a logit, in standard deviations of its row: mean and range over prompts. It
also shows the share of tokens whose largest logit stays the same.
"""

from collections.abc import Sequence
from itertools import product
from statistics import mean

import numpy as np
import torch

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import Move
from hicache.cli.schema import config_of
from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.pools import Arrival, TorchPools
from hicache.executor.real.rank_pools import PoolSpec
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.verify import Verdict, compared

PAGE = 16
PROMPT_PAGES, ANSWER_PAGES = 16, 10
KINDS = {"full": (FULL,), "swa": (SWA,), "mamba": (MAMBA,), "all": (FULL, SWA, MAMBA)}
FORMS = ("int8", "fp8", "bf16")
MOVES = ((1, 1), (10, 1), (1, 10))  # (moves, turns)
SEEDS = range(5)


def there_and_back(pools: TorchPools, kinds: Sequence[int], num_pages: int) -> None:
    ids = list(range(num_pages))
    each = {MAMBA: ids[:1]}
    moves = [Move(kind, each.get(kind, ids), each.get(kind, ids)) for kind in kinds]
    pools.save(moves)
    pools.load([Arrival(is_within=False, moves=moves)])


def error(seed: int, form: str, kinds: Sequence[int], moves: int, turns: int) -> Verdict:
    config = config_of("model=tiny_hybrid").model
    model = ReferenceModel(config, page_size=PAGE, seed=seed)
    num_pages = PROMPT_PAGES + ANSWER_PAGES
    spec = PoolSpec(
        model=config,
        page_size=PAGE,
        device_counts=(num_pages, num_pages, 1),
        host_counts=(num_pages, num_pages, 1),
        device=torch.device("cpu"),
        host_format=form,
        storage_format=form,
    )
    end, start = num_pages * PAGE, PROMPT_PAGES * PAGE
    tokens = np.random.default_rng(seed).integers(0, 1000, end, dtype=np.int32).tobytes()
    logits = []
    for is_moved in (True, False):
        pools = TorchPools(spec)
        pages = list(range(num_pages))
        memory = PagedKvView(pools, model.words, (pages, pages), 0)
        model.forward(tokens, 0, start, memory)
        rows = []
        for page in range(PROMPT_PAGES, num_pages):
            if is_moved and page - PROMPT_PAGES < turns:
                for _ in range(moves):
                    there_and_back(pools, kinds, page)
            first = page * PAGE
            rows.append(model.forward(tokens, first, first + PAGE, memory, logits_from=first))
        logits.append(torch.cat(rows))
    return compared(Verdict(0, 1), *logits)


def main() -> None:
    torch.set_num_threads(1)
    print("| format | kind | " + " | ".join(f"{m} × {t} turns" for m, t in MOVES) + " |")
    print("|---|---|" + "---|" * len(MOVES))
    for form, name in product(FORMS, KINDS):
        cells = []
        for moves, turns in MOVES:
            verdicts = [error(seed, form, KINDS[name], moves, turns) for seed in SEEDS]
            errors = [each.error for each in verdicts]
            agreement = sum(v.num_agree for v in verdicts) / sum(v.num_tokens for v in verdicts)
            cells.append(
                f"{mean(errors):.3f} ({min(errors):.3f}–{max(errors):.3f}), {agreement:.1%}"
            )
        print(f"| {form} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
