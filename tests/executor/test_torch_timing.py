"""The timing model does its work on the pools of a real model's shape."""

import itertools

import numpy as np
import pytest
import torch

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.timing_model import TimingModel
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny

CPU = torch.device("cpu")
TOKENS = np.arange(40, dtype=np.int32).tobytes()


def pools_of(config):
    return cpu_pools(config, 8, (5, 5, 1))


@pytest.mark.parametrize("pattern", ["F", "S"])
def test_attention_sees_the_same_tokens_however_a_prompt_is_cut(pattern):
    config = tiny(pattern, 8)
    model = TimingModel(config, page_size=8, device=CPU)
    pages = np.arange(5, dtype=np.int32)
    last = []
    for cuts in ((0, 40), (0, 1, 40), (0, 20, 36, 40), (0, 39, 40)):
        pools = pools_of(config)
        memory = PagedKvView(pools, model.words, (pages, pages), 0)
        for start, end in itertools.pairwise(cuts):
            logits = model.forward(TOKENS, start, end, memory)
        last.append(logits)
    for logits in last[1:]:
        torch.testing.assert_close(logits, last[0])


@pytest.mark.parametrize("pattern", ["F", "S", "F S M D"])
def test_every_token_is_written_in_every_layer(pattern):
    config = tiny(pattern, 8)
    model = TimingModel(config, page_size=8, device=CPU)
    pools = pools_of(config)
    pages = np.arange(5, dtype=np.int32)[::-1].copy()
    for kind in (0, 1):
        pools.poison(0, kind, pages)
    memory = PagedKvView(pools, model.words, (pages, pages), 0)
    ready: list[int] = []
    for start, end in ((0, 20), (20, 36), (36, 37)):
        logits = model.forward(TOKENS, start, end, memory, ready=ready.append)
        assert logits.shape == (1, 64)
        assert logits.isfinite().all()
    assert ready == list(range(len(model.words))) * 3
    for slab in pools.ranks[0].kv.values():
        assert slab[:, :, pages[:4]].isfinite().all()
        assert slab[:, :, pages[4], :5].isfinite().all()
        assert slab[:, :, pages[4], 5:].isnan().all()
