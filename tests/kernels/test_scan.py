"""Recurrent scans: outputs, and the states and taps that are captured on the way.

Small scans have fp32 inputs. At the shapes of models, taps, inputs and gates are bf16.
"""

import functools
from itertools import pairwise

import pytest
import torch
from on_gpu import ON_GPU

from hicache.kernels import scan as kernels
from hicache.kernels.scan import ScanWeights, naive_scan, scan
from hicache.workbench.codegen_cases import SCANS

CPU = torch.device("cpu")
DIM, KEYS, TAPS, SLOTS, BLOCK = 16, 32, 3, 5, 4
SMALL = {"ssd": ((KEYS, DIM), True), "delta": ((KEYS, DIM), False)}  # as in SCANS
SHAPES = SMALL | SCANS
ENDS = [[3, 4], [4, 1], [7, 3], [9, 2]]  # the last is the slot that is read
ROWS = ENDS[-1][0]
# sums of up to 128 fp32 products in another order, and exp and log of another library, over 9
# steps: an error in terms of the largest result
TOLERANCE = 1e-5


def i32(rows, device=CPU):
    return torch.tensor(rows, dtype=torch.int32, device=device)


def case(name, device=CPU, dtype=None):
    """Random taps, states, inputs, gates and weights; `dtype` converts all of them."""
    (keys, dim), has_skip = SHAPES[name]
    generator = torch.Generator().manual_seed(3)
    heads, half = (32 if ON_GPU else 1, torch.bfloat16) if name in SCANS else (2, torch.float32)
    channels = dim + 2 * keys

    def draw(*shape, of=torch.float32):
        return torch.randn(*shape, generator=generator).to(of).to(device, dtype)

    weights = ScanWeights(
        draw(TAPS + 1, heads, channels),
        draw(heads).abs() * 0.1,
        draw(heads) if has_skip else None,
    )
    taps = draw(SLOTS, heads, TAPS, channels, of=half)
    states = draw(SLOTS, heads, keys, dim)
    gates = draw(ROWS, 1 if has_skip else 2, heads, of=half)
    return taps, states, draw(ROWS, heads, channels, of=half), gates, weights


def run(launch, name, device, cuts=(0, ROWS), ends=ENDS, dtype=None, spoil=lambda *case: case):
    """Compute the rows in launches between `cuts`; return outputs, taps and states of all slots."""
    taps, states, inputs, gates, weights = spoil(*case(name, device, dtype))
    outputs = []
    for first, end in pairwise(cuts):
        its = [[n - first, slot] for n, slot in ends if first < n <= end and slot != 2]
        pairs = i32([*its, [end - first, 2]], device)
        sequence, rows = i32([[2, 0, 0, len(pairs), first]], device), slice(first, end)
        given = sequence, pairs, inputs[rows], gates[rows], weights
        outputs.append(launch(taps, states, *given, block=BLOCK))
    return torch.cat(outputs).cpu(), taps.cpu(), states.cpu()


@functools.cache
def whole(name, device):
    """Outputs, taps and states of one launch of the kernel, shared by tests that only read them."""
    return run(scan, name, device)


def sequential(name):
    """Taps and states at `ENDS` in fp64: one launch of the reference per token, no captures."""
    taps, states, *_ = case(name, dtype=torch.float64)
    for number, slot in ENDS:
        cuts = range(number + 1)
        _, its_taps, its_states = run(naive_scan, name, CPU, cuts, [], torch.float64)
        taps[slot], states[slot] = its_taps[2], its_states[2]
    return taps, states


def is_near(got, wanted):
    wanted = wanted.double()
    return bool((got.double() - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("ssd", 1), ("ssd", 2), ("delta", 1), ("delta", 2)),
        *(
            pytest.param(name, 1, marks=[] if has_skip or ON_GPU else [pytest.mark.soak])
            for name, (_, has_skip) in SCANS.items()
        ),
    ],
)
def test_captured_states_are_those_of_a_sequential_scan(name, share, device, monkeypatch):
    if share > 1:  # two programs share a head
        monkeypatch.setattr(kernels, "TILE", DIM // share * KEYS)
    outputs, taps, states = whole(name, device) if share == 1 else run(scan, name, device)
    wanted_taps, wanted_states = sequential(name)
    assert torch.equal(taps.double(), wanted_taps)
    assert is_near(states, wanted_states)
    wanted, naive_taps, naive_states = run(naive_scan, name, CPU, dtype=torch.float64)
    assert is_near(outputs, wanted)
    assert torch.equal(naive_taps, wanted_taps)
    assert is_near(naive_states, wanted_states)


LAUNCHES = pytest.mark.parametrize("launch", [scan, naive_scan])


@LAUNCHES
@pytest.mark.parametrize("name", SMALL)
def test_bits_do_not_depend_on_where_launches_begin_and_end(name, launch, device):
    device = device if launch is scan else CPU
    uncut = whole(name, device) if launch is scan else run(launch, name, device)
    assert all(map(torch.equal, uncut, run(launch, name, device, cuts=(0, 1, 2, 5, 8, ROWS))))


FAULTS = {
    "tap": ("ssd", lambda *its: (*its[:4], its[4]._replace(conv=its[4].conv.roll(1, 0)))),
    "skip": ("ssd", lambda *its: (*its[:4], its[4]._replace(skip=its[4].skip * 1.01))),
    "strength": ("delta", lambda *its: (*its[:3], its[3].flip(1), its[4])),
}


@pytest.mark.parametrize(("name", "spoil"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_of_a_scan_exceeds_the_tolerance(name, spoil, device):
    got, wrong = whole(name, device)[0], run(naive_scan, name, CPU, spoil=spoil)[0]
    assert not is_near(got, wrong)


def test_one_launch_of_the_scan_writes_all_captured_states(device, monkeypatch):
    launches, kernel = [], kernels._scan_kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "_scan_kernel", Counted())
    run(scan, "ssd", device)
    assert len(launches) == 1


def test_a_scan_with_fp64_states_is_refused(device):
    taps, states, *given = case("ssd")
    with pytest.raises(ValueError, match=r"fp32 states .* got .* torch\.float64"):
        scan(taps, states.double(), i32([[2, 0, 0, 1, 0]]), i32([[ROWS, 2]]), *given, block=BLOCK)


@LAUNCHES
@pytest.mark.parametrize("name", SMALL)
def test_sequences_scanned_in_one_launch_equal_a_launch_of_each(name, launch, device, monkeypatch):
    monkeypatch.setattr(kernels, "TILE", DIM // 2 * KEYS)  # two programs share a head
    device = device if launch is scan else CPU
    rows = [slice(1, 4), slice(4, 5), slice(6, ROWS)]
    ends = [[2, 3], [3, 0], [1, 1], [3, 2]]
    sequences = [[0, 1, 0, 2, 0], [1, 4, 2, 3, 5], [2, 6, 3, 4, 38]]
    taps, states, inputs, gates, weights = case(name, device)
    tables = i32(sequences, device), i32(ends, device)
    out = launch(taps, states, *tables, inputs, gates, weights, block=BLOCK)
    its_taps, its_states, *_ = case(name, device)
    wanted = torch.zeros_like(out)
    for (source, _, *its_ends, start), its_rows in zip(sequences, rows, strict=True):
        pairs = ends[slice(*its_ends)]
        alone = i32([[source, 0, 0, len(pairs), start]], device), i32(pairs, device)
        its = inputs[its_rows], gates[its_rows], weights
        wanted[its_rows] = launch(its_taps, its_states, *alone, *its, block=BLOCK)
    assert all(map(torch.equal, (out, taps, states), (wanted, its_taps, its_states)))
