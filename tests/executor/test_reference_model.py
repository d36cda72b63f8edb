"""The reference model equals one without pages, and itself with other chunks, pages and ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import Move
from hicache.cache.tree.node import DEVICE
from hicache.executor.real.pools import Arrival
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import HoleError
from tests.executor.cpu_pools import cpu_pools
from tests.executor.one_sequence import (
    INDEX,
    LENGTH,
    NUM_PAGES,
    PAGE,
    TOKENS,
    WINDOW,
    OneSequence,
    shape_of,
)

WIDE = 3  # the number of the second window's kind
ATTENDED = FULL, SWA, WIDE
ALL = "FtI S W M D"
PLAIN = ["F", "S", "M", "D", "F S M D"]


def model_of(pattern: str) -> ReferenceModel:
    return ReferenceModel(shape_of(pattern), page_size=PAGE)


def sequence_of(
    model: ReferenceModel, *, tp: int = 1, stages: Sequence[int] = (), seed: int | None = None
) -> OneSequence:
    """The sequence on pages that hold NaN, in ascending order or (with a seed) a random one."""
    counts = (NUM_PAGES, NUM_PAGES, 1, NUM_PAGES), (NUM_PAGES, NUM_PAGES, 2, NUM_PAGES)
    pools = cpu_pools(model.config, PAGE, *counts, tp=tp, stage_layers=stages)
    for kind in ATTENDED:
        pools.poison(DEVICE, kind, range(NUM_PAGES))
    pages = np.arange(NUM_PAGES) if seed is None else np.random.default_rng(seed).permutation(8)
    return OneSequence(model, pools, TOKENS, [pages.tolist()] * 4)


@pytest.mark.parametrize(
    ("pattern", "tp"),
    [("FtI", 1), ("FtI", 2), ("W", 2), (ALL, 2), *product(["F S M D"], [1, 2, 4]), ("F", 4)],
)
def test_logits_do_not_depend_on_chunks_the_order_of_pages_or_ranks(pattern, tp):
    model = model_of(pattern)
    whole = sequence_of(model).in_cuts([LENGTH])
    cuts = [16, 24, *range(25, 45), 48, LENGTH]
    assert torch.equal(sequence_of(model, tp=tp, seed=1).in_cuts(cuts), whole)
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize(("tp", "stages"), [(1, (5, 3)), (2, (4, 4)), (4, (4, 4))])
def test_logits_do_not_depend_on_pipeline_stages(tp, stages):
    model = model_of("F S M D F S D M")
    whole = sequence_of(model).in_cuts([LENGTH])
    split = sequence_of(model, tp=tp, stages=stages, seed=1)
    assert torch.equal(split.in_cuts([16, 24, 30, LENGTH]), whole)
    # a rank has memory for the layers of its stage alone
    assert len(split.pools.ranks) == tp * len(stages)
    for number, rank in enumerate(split.pools.ranks):
        first = sum(stages[: number // tp])
        layers = {int(line[1:].split()[0]) for line in rank.layout}
        assert layers == set(range(first, first + stages[number // tp]))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_attends_with_all_query_heads_of_its_kv_heads(tp):
    """So a program has as many rows on any number of ranks, and sums run in the same order."""
    model = model_of("F")
    sequence, heads = sequence_of(model, tp=tp), []
    plane = sequence.pools.plane

    def attend(pool, table, tiles, queries, **options):
        heads.append(queries.shape[2] / pool.shape[3])
        return plane.attend(pool, table, tiles, queries, **options)

    sequence.pools.plane = plane._replace(attend=attend)
    sequence.forward(0, 1)
    assert heads == [model.config.num_query_heads / model.config.num_kv_heads] * tp


@pytest.mark.parametrize("pattern", PLAIN)
def test_logits_are_those_of_a_model_without_pages(pattern):
    model = model_of(pattern)
    got = sequence_of(model, seed=0).in_cuts([LENGTH])
    torch.testing.assert_close(got.double(), dense(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("word", "kind", "num_before"), [("S", SWA, 2), ("W", WIDE, 3)])
def test_a_window_needs_its_pages_and_reads_no_page_before_them(word, kind, num_before):
    model = model_of(word)
    whole, its = sequence_of(model).in_cuts([LENGTH]), sequence_of(model)
    its.forward(0, 40)
    its.pages[kind][:num_before] = [-1] * num_before
    assert torch.equal(its.forward(40, 48, logits_from=40), whole[40:48])
    its.pages[kind][5] = -1
    with pytest.raises(HoleError, match="at least one is missing"):
        its.forward(48, LENGTH)


@pytest.mark.parametrize("spoiled", [None, "index", "wide"])
def test_index_keys_and_a_second_window_are_loaded_back_from_the_host(spoiled):
    model = model_of(ALL)
    whole, its = sequence_of(model).in_cuts([LENGTH]), sequence_of(model)
    its.forward(0, 40)
    pages, pools = range(NUM_PAGES), its.pools
    others = pages[::-1]
    pools.save([*(Move(kind, pages, others) for kind in ATTENDED), Move(MAMBA, [0], [1])])
    host = pools.ranks[0].host
    if spoiled == "index":  # the last bytes of an item
        host[FULL][others[1], -PAGE * 8 * 4 :] = 0
    elif spoiled == "wide":
        host[WIDE][others[4]] = 0
    for kind in ATTENDED:
        pools.poison(DEVICE, kind, pages)
    moves = [*(Move(kind, others, pages) for kind in ATTENDED), Move(MAMBA, [1], [0])]
    pools.load([Arrival(is_within=False, moves=moves)])
    assert torch.equal(its.forward(40, LENGTH, logits_from=40), whole[40:]) is (spoiled is None)


@pytest.mark.parametrize(
    ("pattern", "parts", "sentence"),
    [
        ("F -", (WINDOW, INDEX), "layers F, S, M, D, FtI, W, got '-'"),
        (ALL, (replace(WINDOW, dim=8), INDEX), "no parts but other windows and one of index keys"),
        (ALL, (replace(WINDOW, heads=1), INDEX), "no parts but other windows"),
        (ALL, (WINDOW, replace(INDEX, tokens=4)), "no parts but other windows"),
    ],
)
def test_a_model_with_unknown_layers_or_parts_is_refused(pattern, parts, sentence):
    with pytest.raises(ValueError, match=sentence):
        ReferenceModel(shape_of(pattern, parts=parts), page_size=PAGE)


def dense(model: ReferenceModel) -> Tensor:
    """The logits in fp64 without pages: all tokens at once, states token by token."""
    config = model.config
    ids = np.frombuffer(TOKENS, np.int32).astype(np.int64) % model.vocab_size
    x = model._embedding.double()[torch.from_numpy(ids)]
    for word, layer in zip(model.words, model._layers, strict=True):
        weights = {name: weight.double() for name, weight in layer.items()}
        mix = dense_attention if word in "FS" else dense_scan
        x = x + mix(config, word, weights, norm(x)) @ weights["out"]
        up, gate = (norm(x) @ weights["up"]).chunk(2, dim=-1)
        x = x + (up * functional.silu(gate)) @ weights["down"]
    return norm(x) @ model._head.double()


def norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def dense_attention(config, word: str, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    heads, kv_heads, dim = config.num_query_heads, config.num_kv_heads, config.head_dim
    projected = (x @ weights["qkv"]).view(LENGTH, -1, dim).transpose(0, 1)
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequency
    pairs = torch.view_as_complex(projected[: heads + kv_heads].reshape(-1, LENGTH, dim // 2, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    outputs = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = turned[head] @ turned[heads + kv_head].T / dim**0.5
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        seen = distance >= 0
        if word == "S":
            seen &= distance < config.window_len
        weight = torch.where(seen, scores.exp(), 0)
        total = weight.sum(-1, keepdim=True) + weights["sink"][head].exp()
        outputs.append(weight / total @ projected[heads + kv_heads + kv_head])
    return torch.cat(outputs, dim=-1)


def dense_scan(config, word: str, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    heads, dim, size = (
        config.recurrent_heads,
        config.recurrent_head_dim,
        config.recurrent_state_dim,
    )
    sizes = [heads * (dim + 2 * size), heads * dim, heads * (1 if word == "M" else 2)]
    inputs, z, gates = torch.split((x @ weights["in"])[:, : sum(sizes)], sizes, dim=-1)
    inputs = inputs.view(LENGTH, heads, dim + 2 * size)
    taps = config.conv_taps
    padded = torch.cat([inputs.new_zeros(taps - 1, *inputs.shape[1:]), inputs])
    mixed = sum(padded[tap : tap + LENGTH] * weights["conv"][tap] for tap in range(taps))
    value, key, query = torch.split(functional.silu(mixed), [dim, size, size], dim=-1)
    outputs = torch.zeros(LENGTH, heads, dim, dtype=torch.float64)
    for head in range(heads):
        state = torch.zeros(size, dim, dtype=torch.float64)
        rate = weights["decay"][head]
        for token in range(LENGTH):
            v, k, q = value[token, head], key[token, head], query[token, head]
            if word == "M":
                step = functional.softplus(gates[token, head])
                state = torch.exp(-rate * step) * state + step * torch.outer(k, v)
                outputs[token, head] = q @ state + weights["skip"][head] * v
            else:
                k, q = k / k.norm(), q / q.norm()
                strength = torch.sigmoid(gates[token, head])
                decay = torch.exp(-rate * functional.softplus(gates[token, heads + head]))
                state = decay * (state - strength * torch.outer(k, k @ state))
                state = state + strength * torch.outer(k, v)
                outputs[token, head] = q @ state
    return norm(outputs).flatten(1) * functional.silu(z)
