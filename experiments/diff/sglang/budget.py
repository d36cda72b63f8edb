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
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.eviction import Lru
from hicache.cache.tree.node import SWA
from hicache.cache.tree.radix_tree import RadixTree
from hicache.config import SchedulerConfig
from hicache.scheduler.admission import Admission
from hicache.scheduler.budget import StepBudget, swa_budget_for_req
from hicache.scheduler.decision import Admit, Defer

from sglang.srt.mem_cache.prefill_budget import (  # isort: skip
    SWAPrefillBudget,
    estimate_swa_kv_tokens,
)

CASES = 100_000
State = SimpleNamespace  # as `drawn` fills it


def main() -> None:
    """Compare, and exit with 1 if anything differs."""
    random = Random(0)
    differing: Counter[str] = Counter()
    admitted = 0
    for _ in range(CASES):
        state = drawn(random)
        differing["charge"] += their_charge(state) != our_charge(state)
        may, their_chunk = their_decision(state)
        ours = our_decision(state)
        admitted += bool(may)
        differing["decision"] += may != isinstance(ours, Admit)
        differing["chunk"] += may and isinstance(ours, Admit) and their_chunk != ours.chunk_tokens
    print(f"{CASES:,} states, {admitted:,} admitted; differences: {dict(differing)}")
    sys.exit(any(differing.values()))


def drawn(random: Random) -> State:
    """A request that may be admitted, and what there is: tokens, but for `swa_pages`."""
    page, window = random.choice([1, 16, 64]), random.choice([1, 63, 64, 128, 1000, 1024, 4096])
    swa_pages = random.randint(1, 400)
    return SimpleNamespace(
        page=page,
        window=window,
        extend=random.randint(1, 20_000),
        new=random.randint(0, 4096),
        chunk=random.choice([64, 512, 2048, 8192]),
        swa_host_hit=random.choice([0, 0, random.randint(1, window)]),
        device_prefix=random.randint(0, 400) * page,
        host_prefix=random.choice([0, random.randint(0, 40) * page]),
        full_room=random.randint(1, 1500) * page,
        swa_pages=swa_pages,
        swa_room=random.randint(0, swa_pages) * page,
        reserved=random.choice([0, 5000]),
        reserved_swa=random.choice([0, page, 700]),
    )


def their_charge(state: State) -> int:
    """Tokens that SGLang charges to the window pool."""
    charge: int = estimate_swa_kv_tokens(
        state.extend,
        state.new,
        sliding_window_size=state.window,
        page_size=state.page,
        allocation_limit=state.chunk,
        host_hit_length=state.swa_host_hit,
    )
    return charge


def our_charge(state: State) -> int:
    """Tokens that we charge to it."""
    return swa_budget_for_req(
        "sglang_0_5_23",
        extend=state.extend,
        chunk=state.chunk,
        window=state.window,
        page=state.page,
        swa_host_hit_length=state.swa_host_hit,
        max_new=state.new,
    )


def their_decision(state: State) -> tuple[bool, int]:
    """Whether SGLang admits it, and the tokens of its first chunk."""
    budget = SWAPrefillBudget(
        SimpleNamespace(
            page_size=state.page,
            size_swa=state.swa_pages * state.page,
            full_available_size=lambda: state.full_room,
            swa_available_size=lambda: state.swa_room,
            _swa_req_ring=False,
        ),
        SimpleNamespace(
            sliding_window_size=state.window,
            full_evictable_size=lambda: 0,
            swa_evictable_size=lambda: 0,
        ),
    )
    budget.total_offset, budget.swa_offset = state.reserved, state.reserved_swa
    may, chunk = budget.check_prefill(
        extend_input_len=state.extend,
        total_tokens=state.host_prefix + state.extend + state.new + state.page,
        max_new_tokens=state.new,
        input_tokens=state.extend,
        swa_host_hit_length=state.swa_host_hit,
        chunk_limit=state.chunk,
    )
    return may, chunk


def our_decision(state: State) -> Admit | Defer:
    """`Admission.decide` of a cache that holds nothing, with as much room as the state has."""
    page = state.page
    tree = RadixTree(page_size=page, policy=Lru(), window_len=state.window)
    on_device, on_host = (
        [PageAllocator(count) for count in counts]
        for counts in ((state.full_room // page, state.swa_pages, 0), (0, 0, 0))
    )
    on_device[SWA].allocate(state.swa_pages - state.swa_room // page)
    cache = PrefixCache(tree, (on_device, on_host), page_bytes=(1, 1, 1))
    admission = Admission(cache, SchedulerConfig(swa_budget="sglang_0_5_23"))
    usable = state.device_prefix + state.host_prefix
    return admission.decide(
        SimpleNamespace(target_len=usable + state.extend, remaining_output=state.new),
        tree.match(b"", 0)._replace(
            device_prefix_len=state.device_prefix,
            usable_len=usable,
            host_hit_length=state.host_prefix,
            swa_host_hit_length=state.swa_host_hit,
        ),
        StepBudget(
            chunk_tokens=state.chunk,
            reserved_tokens=state.reserved,
            reserved_swa_tokens=state.reserved_swa,
        ),
    )


if __name__ == "__main__":
    main()
