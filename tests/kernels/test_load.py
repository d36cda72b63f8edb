"""Load-backs: all kinds and layers in one launch, with a counter for each layer."""

import pytest
import torch

from hicache.kernels.load import LoadBuffer, load_items, load_of, load_table, naive_load_items
from hicache.kernels.transcode import Format, coded_bytes, coded_of

WORDS = "MFMFS-"  # layers; S and F share no ids, - has no buffers
SHAPES = {"F": [(4, 2, 128)] * 2, "S": [(4, 1, 128)] * 2, "M": [(6, 24), (2, 128, 64)]}
KINDS = {"F": 0, "S": 1, "M": 2}
COUNTS = {"F": 12, "S": 5, "M": 3}
FORMS = [None, "int8", "fp8"]


def buffers(device, form):
    """Random items on the host, and poisoned items on the device."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for layer, word in enumerate(WORDS):
        for place, shape in enumerate(SHAPES.get(word, [])):
            is_tap = word == "M" and place == 0
            dtype = torch.float32 if word == "M" and not is_tap else torch.bfloat16
            code = None if form is None or is_tap else Format[form]
            target = torch.full((COUNTS[word], *shape), 7.0, dtype=dtype).to(device)
            items = torch.randn(target.shape, generator=generator).to(dtype)
            source = coded_of(items, code) if code else items.view(torch.uint8).flatten(1)
            if code:
                padding = coded_bytes(shape, code) - source.shape[1]
                source = torch.nn.functional.pad(source, (0, padding))
            source = source.pin_memory() if device.type == "cuda" else source
            made.append(LoadBuffer(layer, KINDS[word], source, target, code))
    return made


def moves(*counts):
    generator = torch.Generator().manual_seed(2)
    names = [*KINDS]
    return {
        KINDS[name]: tuple(
            torch.randperm(COUNTS[name], generator=generator)[:count].int() for _ in range(2)
        )
        for name, count in zip(names, counts, strict=True)
        if count
    }


def loaded(device, form, wanted, launch, *, num_launches=1, **options):
    its = buffers(device, form)
    table = load_table(its, len(WORDS))
    counters = torch.zeros(len(WORDS), 2, dtype=torch.int32, device=device)
    for _ in range(num_launches):
        launch(table, load_of(table, wanted), counters, **options)
    return [each.target.cpu() for each in its], counters.tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("counts", "num_programs"), [((7, 3, 2), 3), ((1, 0, 0), 1), ((0, 0, 1), 5)]
)
def test_one_launch_loads_every_kind_and_counts_every_layer(device, form, counts, num_programs):
    wanted = moves(*counts)
    got, counters = loaded(
        device, form, wanted, load_items, num_programs=num_programs, num_launches=2
    )
    expected, _ = loaded(torch.device("cpu"), form, wanted, naive_load_items)
    assert all(map(torch.equal, got, expected))
    assert any((each != 7.0).any() for each in got)
    assert counters == [[0, 2]] * len(WORDS)


def test_the_reference_loads_some_layers():
    wanted = moves(4, 2, 1)
    all_of, _ = loaded(torch.device("cpu"), None, wanted, naive_load_items)
    first, counters = loaded(torch.device("cpu"), None, wanted, naive_load_items, layers=range(2))
    assert [each for _, each in counters] == [1, 1, 0, 0, 0, 0]
    layers = [each.layer for each in buffers(torch.device("cpu"), None)]
    for layer, one, other in zip(layers, first, all_of, strict=True):
        assert torch.equal(one, other) == (layer < 2)


def test_ids_out_of_range_are_refused(device):
    table = load_table(buffers(device, None), len(WORDS))
    ids = torch.tensor([12], dtype=torch.int32)
    with pytest.raises(ValueError, match="source ids must be below 12, got 12"):
        load_of(table, {0: (ids, ids - 1)})
