"""SGLang's admission against ours, number by number over random states.

Run by `python -m experiments.diff.admission`, in the environment of the release. Two things are
compared: what a request is charged to the window pool, and the decision with the chunk it may have.
"""

import sys
from collections import Counter
from random import Random
from types import SimpleNamespace

from experiments.diff.sglang import device  # noqa: F401  # before anything of the package
from hicache.cache.pages import PageAllocator
from hicache.cache.tree.node import FULL, SWA
from hicache.config import SchedulerConfig
from hicache.scheduler.admission import Admission
from hicache.scheduler.budget import StepBudget, swa_budget_for_req
from hicache.scheduler.decision import Admit, Defer

from sglang.srt.mem_cache.prefill_budget import (  # isort: skip
    SWAPrefillBudget,
    estimate_swa_kv_tokens,
)

CASES = 100_000


def main() -> None:
    """Compare, and exit with 1 if anything differs."""
    random = Random(0)
    differing: Counter[str] = Counter()
    admitted = 0
    for _ in range(CASES):
        page = random.choice([1, 16, 64])
        window = random.choice([1, 63, 64, 128, 1000, 1024, 4096])
        extend, new = random.randint(1, 20_000), random.randint(0, 4096)
        chunk = random.choice([64, 512, 2048, 8192])
        host_hit = random.choice([0, 0, random.randint(1, window)])
        differing["charge"] += estimate_swa_kv_tokens(
            extend,
            new,
            sliding_window_size=window,
            page_size=page,
            allocation_limit=chunk,
            host_hit_length=host_hit,
        ) != swa_budget_for_req(
            "sglang_0_5_23",
            extend=extend,
            chunk=chunk,
            window=window,
            page=page,
            swa_host_hit_length=host_hit,
            max_new=new,
        )
        device_prefix = random.randint(0, 400) * page
        host_prefix = random.choice([0, random.randint(0, 40) * page])
        full = random.randint(1, 1500) * page
        swa_pages = random.randint(1, 400)
        swa_free = random.randint(0, swa_pages) * page
        reserved, reserved_swa = random.choice([0, 5000]), random.choice([0, page, 700])
        target = device_prefix + host_prefix + extend
        theirs = SWAPrefillBudget(
            SimpleNamespace(
                page_size=page,
                size_swa=swa_pages * page,
                full_available_size=lambda full=full: full,
                swa_available_size=lambda swa_free=swa_free: swa_free,
                _swa_req_ring=False,
            ),
            SimpleNamespace(
                sliding_window_size=window,
                full_evictable_size=lambda: 0,
                swa_evictable_size=lambda: 0,
            ),
        )
        theirs.total_offset, theirs.swa_offset = reserved, reserved_swa
        may, their_chunk = theirs.check_prefill(
            extend_input_len=extend,
            total_tokens=target - device_prefix + new + page,
            max_new_tokens=new,
            input_tokens=extend,
            swa_host_hit_length=host_hit,
            chunk_limit=chunk,
        )
        ours = our_decision(
            page=page,
            window=window,
            target=target,
            device_prefix=device_prefix,
            usable=device_prefix + host_prefix,
            new=new,
            host_hit=host_hit,
            rooms={FULL: full, SWA: swa_free},
            swa_pages=swa_pages,
            budget=StepBudget(
                chunk_tokens=chunk, reserved_tokens=reserved, reserved_swa_tokens=reserved_swa
            ),
        )
        admitted += bool(may)
        differing["decision"] += may != isinstance(ours, Admit)
        differing["chunk"] += may and isinstance(ours, Admit) and their_chunk != ours.chunk_tokens
    print(f"{CASES:,} states, {admitted:,} admitted; that differ: {dict(differing)}")
    sys.exit(any(differing.values()))


def our_decision(
    *,
    page: int,
    window: int,
    target: int,
    device_prefix: int,
    usable: int,
    new: int,
    host_hit: int,
    rooms: dict[int, int],
    swa_pages: int,
    budget: StepBudget,
) -> Admit | Defer:
    """`Admission.decide` in a state made by hand."""
    cache = SimpleNamespace(
        page_size=page,
        tree=SimpleNamespace(has_swa=True, has_states=False, window_len=window),
        room=rooms.__getitem__,
        pools=[[None, PageAllocator(swa_pages), None]],
    )
    admission = Admission(
        cache,  # type: ignore[arg-type]
        SchedulerConfig(swa_budget="sglang_0_5_23"),
    )
    return admission.decide(
        SimpleNamespace(target_len=target, remaining_output=new),  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            usable_len=usable,
            device_prefix_len=device_prefix,
            host_hit_length=usable - device_prefix,
            swa_host_hit_length=host_hit,
        ),
        budget,
    )


if __name__ == "__main__":
    main()
