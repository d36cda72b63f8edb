"""Appended keys and values lie where PyTorch puts them, at small sizes and at those of models."""

import pytest
import torch
from on_gpu import ON_GPU

from hicache.kernels.append import append, naive_append
from hicache.workbench.codegen_cases import APPENDS, Heads

NUM_TILES = 64 if ON_GPU else 2
SMALL = [Heads(page, 21, 8, heads=3) for page in (4, 16)]
# rows of fp32 are wider: at small sizes, and at one of a model
CASES = [(shape, torch.bfloat16) for shape in (*APPENDS.values(), *SMALL)]
CASES += [(shape, torch.float32) for shape in (APPENDS["append to pages of 64 × 1 head"], *SMALL)]


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_appended_keys_and_values_lie_where_torch_puts_them(shape, dtype, device, generator):
    tile, columns = torch.arange(NUM_TILES), 3 + shape.rows // shape.page
    num_pages = NUM_TILES * columns + 3
    # a pool between others, and keys beside values as a projection leaves them
    slab = torch.randn(2, 3, num_pages, shape.page, shape.heads, shape.dim, generator=generator)
    both = torch.randn(NUM_TILES, shape.rows, 2 * shape.heads + 1, shape.dim, generator=generator)
    table = torch.randperm(num_pages, generator=generator)[: NUM_TILES * columns]
    left_out = 1 + tile % 2
    position = left_out * shape.page + 5 * (tile + 1) % shape.page
    tiles = torch.stack([position, 3 * (tile % 2), shape.rows - tile % 7, left_out], dim=1)
    ids = [table.int().view(NUM_TILES, columns), tiles.int()]
    slab, both = slab.to(dtype), both.to(dtype)
    keys, values = both[:, :, : shape.heads], both[:, :, shape.heads : -1]
    wanted, got = slab.clone(), slab.clone().to(device)
    naive_append(wanted[:, 1], *ids, keys, values)
    ids, (keys, values) = [each.to(device) for each in ids], both.to(device)[:, :, :-1].chunk(2, 2)
    append(got[:, 1], *ids, keys, values)
    assert torch.equal(got.cpu(), wanted)
    assert (wanted != slab).sum() > slab[:, 1].numel() // 8
    append(got[:, 1], *ids, values, keys)
    assert not torch.equal(got.cpu(), wanted)  # keys and values exchanged


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda pool, keys: (pool.repeat(1, 1, 1, 9, 80), keys), "rows of at most 32768 bytes"),
        (lambda pool, keys: (pool, keys[..., :4]), "keys: contiguous rows of 3 × 8 wanted, got"),
        (lambda pool, keys: (pool, keys.mT.contiguous().mT), "keys: contiguous rows"),
        (lambda pool, keys: (pool, keys.transpose(0, 1)), "keys: rows equally far apart"),
    ],
)
def test_appends_of_unsupported_shapes_and_strides_are_refused(change, sentence, device):
    pool, keys = torch.zeros(2, 3, 4, 3, 8, device=device), torch.zeros(2, 5, 3, 8, device=device)
    pool, keys = change(pool, keys)
    ids = torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=sentence):
        append(pool, ids, ids, keys, keys)
