"""The reference model against one that knows no pages, and against itself in other cuts."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import HoleError
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.one_sequence import OneSequence

PAGE = 8
LENGTH = 61
TOKENS = np.random.default_rng(0).integers(0, 10_000, LENGTH, dtype=np.int32).tobytes()


def sequence_of(model: ReferenceModel, *, tp: int = 1, seed: int = 0) -> OneSequence:
    """Pages in any order, poisoned: what is not written is NaN."""
    num_pages = -(-LENGTH // PAGE)
    pools = cpu_pools(model.config, model.page_size, (num_pages, num_pages, 1), tp=tp)
    pages = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    for kind in (0, 1):
        pools.poison(0, kind, pages)
    return OneSequence(model, pools, TOKENS, (pages, pages))


@pytest.mark.parametrize("pattern", ["F", "S", "M", "D", "F S M D"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_do_not_depend_on_the_cut_the_pages_or_the_ranks(pattern, tp):
    model = ReferenceModel(tiny(pattern, PAGE), page_size=PAGE)
    whole = sequence_of(model).in_cuts([LENGTH])
    cuts = [16, 24, *range(25, 45), 48, LENGTH]
    assert torch.equal(sequence_of(model, tp=tp, seed=1).in_cuts(cuts), whole)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_attends_with_all_query_heads_of_its_kv_heads(tp):
    # so a program has as many rows on any number of ranks, and sums run in the same order
    model = ReferenceModel(tiny("F", PAGE), page_size=PAGE)
    sequence, heads = sequence_of(model, tp=tp), []
    plane = sequence.pools.plane

    def attend(pool, table, tiles, queries, **options):
        heads.append(queries.shape[2] / pool.shape[3])
        return plane.attend(pool, table, tiles, queries, **options)

    sequence.pools.plane = plane._replace(attend=attend)
    sequence.forward(0, 1)
    assert heads == [model.config.num_query_heads / model.config.num_kv_heads] * tp


@pytest.mark.parametrize("pattern", ["F", "S", "M", "D", "F S M D"])
def test_logits_are_those_of_a_model_without_pages(pattern):
    config = tiny(pattern, PAGE)
    model = ReferenceModel(config, page_size=PAGE)
    got = sequence_of(model).in_cuts([LENGTH])
    torch.testing.assert_close(got.double(), dense(model), rtol=0, atol=1e-4)


def test_a_hole_in_the_window_is_refused():
    model = ReferenceModel(tiny("S", PAGE), page_size=PAGE)
    sequence = sequence_of(model)
    sequence.forward(0, 32)
    sequence.pages[1][3] = -1
    with pytest.raises(HoleError, match="at least one is missing"):
        sequence.forward(32, 40)


def test_a_hole_behind_the_window_is_not_read():
    model = ReferenceModel(tiny("S", PAGE), page_size=PAGE)
    whole = sequence_of(model).in_cuts([LENGTH])
    sequence = sequence_of(model)
    sequence.forward(0, 40)
    num_left = (40 - model.config.window_len) // PAGE
    sequence.pages[1][:num_left] = [-1] * num_left
    assert torch.equal(sequence.forward(40, LENGTH, logits_from=40), whole[40:])


def test_a_layer_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="layers F, S, M, D, FtI, got '-'"):
        ReferenceModel(tiny("F -", PAGE), page_size=PAGE)


def dense(model: ReferenceModel) -> Tensor:
    """All tokens at once in double precision, states token by token, straight from the papers."""
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
