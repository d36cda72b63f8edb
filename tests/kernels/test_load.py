"""The load-back kernel: all kinds and layers in one launch, with a counter for each layer."""

from contextlib import nullcontext

import pytest
import torch
from on_gpu import ON_GPU

from hicache.kernels.load import (
    LoadBuffer,
    load_items,
    load_of,
    load_table,
    naive_load_items,
    wait_for_layer,
)
from hicache.kernels.transcode import Format, coded_bytes, coded_of
from hicache.workbench.codegen_cases import LOADS, PARTS

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
# layer, kind, shape, dtype and whether it may be coded; the last layer has no buffers
HYBRID = [
    *[(layer, 0, (4, 2, 128), BF16, True) for layer in (1, 3) for _ in range(2)],
    *[(4, 1, (4, 1, 128), BF16, True)] * 2,
    *[
        (layer, 2, shape, dtype, dtype is FP32)
        for layer in (0, 2)
        for shape, dtype in (((6, 24), BF16), ((2, 128, 64), FP32))
    ],
]
COUNTS = 12, 5, 3  # items of each kind


def of_model(name):
    form, parts = LOADS[name]
    num_layers, longest = (4, 64) if ON_GPU else (1, 4)
    return form, [
        (layer, kind, (min(shape[0], longest), *shape[1:]), dtype, part != "taps")
        for layer in range(num_layers)
        for kind, part in enumerate(parts)
        for shape, dtype in [PARTS[part]]
    ]


def buffers(device, form, parts, num_items):
    """Load buffers: random items in host memory, and targets on `device` filled with 7."""
    generator, made = torch.Generator().manual_seed(1), []
    for layer, kind, shape, dtype, may_be_coded in sorted(parts, key=lambda part: part[0]):
        code = form if may_be_coded else None
        target = torch.full((num_items[kind], *shape), 7.0, dtype=dtype).to(device)
        items = torch.randn(target.shape, generator=generator).to(dtype)
        source = coded_of(items, code) if code else items.view(torch.uint8).flatten(1)
        if code:
            padding = coded_bytes(shape, code) - source.shape[1]
            source = torch.nn.functional.pad(source, (0, padding))
        source = source.pin_memory() if device.type == "cuda" else source
        made.append(LoadBuffer(layer, kind, source, target, code))
    return made


def moves(num_items, counts):
    generator = torch.Generator().manual_seed(2)
    return {
        kind: tuple(
            torch.randperm(num, generator=generator)[:count].int().contiguous() for _ in range(2)
        )
        for kind, (num, count) in enumerate(zip(num_items, counts, strict=True))
        if count
    }


def loaded(device, form, parts, num_items, counts, launch, *, num_launches=1, **options):
    """Load on a side stream and read each layer once it is counted; return targets, counters."""
    its = buffers(device, form, parts, num_items)
    num_layers = max(each.layer for each in its) + 2
    table = load_table(its, num_layers)
    counters = torch.zeros(num_layers, 2, dtype=torch.int32, device=device)
    wanted = load_of(table, moves(num_items, counts))
    side = torch.cuda.Stream() if ON_GPU else None
    if side:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side) if side else nullcontext():
        for _ in range(num_launches):
            launch(table, wanted, counters, **options)
    got = []
    for each in its:
        if launch is load_items:
            wait_for_layer(counters, each.layer, num_launches)
        got.append(each.target.clone().cpu())
    return got, counters.tolist()


@pytest.mark.parametrize(
    ("form", "parts", "num_items", "counts", "num_programs"),
    [
        (None, HYBRID, COUNTS, (7, 3, 2), 3),
        (Format.int8, HYBRID, COUNTS, (7, 3, 2), 3),
        (Format.fp8, HYBRID, COUNTS, (1, 0, 0), 1),
        (None, HYBRID, COUNTS, (0, 0, 1), 5),
        *((*of_model(name), *[(64, 8, 8) if ON_GPU else (2, 2, 2)] * 2, None) for name in LOADS),
    ],
)
def test_one_launch_loads_every_kind_and_raises_the_counter_of_every_layer(
    device, form, parts, num_items, counts, num_programs
):
    counts = counts if parts is HYBRID else [*counts[: len({part[1] for part in parts})]]
    given = form, parts, num_items[: len(counts)], counts
    got, counters = loaded(device, *given, load_items, num_programs=num_programs, num_launches=2)
    expected, _ = loaded(CPU, *given, naive_load_items)
    assert all(map(torch.equal, got, expected))
    assert any((each != 7.0).any() for each in got)
    assert counters == [[0, 2]] * len(counters)


def test_the_reference_loads_only_the_given_layers():
    given = None, HYBRID, COUNTS, (4, 2, 1), naive_load_items
    (every, _), (first, counters) = loaded(CPU, *given), loaded(CPU, *given, layers=range(2))
    assert [count for _, count in counters] == [1, 1, 0, 0, 0, 0]
    layers = [each.layer for each in buffers(CPU, None, HYBRID, COUNTS)]
    for layer, one, other in zip(layers, first, every, strict=True):
        assert torch.equal(one, other) == (layer < 2)


def test_a_load_back_with_ids_out_of_range_is_refused(device):
    table = load_table(buffers(device, None, HYBRID, COUNTS), 6)
    ids = torch.tensor([12], dtype=torch.int32)
    with pytest.raises(ValueError, match="source ids must be below 12, got 12"):
        load_of(table, {0: (ids, ids - 1)})
