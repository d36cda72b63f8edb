"""Recurrent scans: outputs, and the states and taps that are captured on the way."""

from itertools import pairwise

import pytest
import torch

from hicache.kernels import scan as kernels
from hicache.kernels.scan import ScanWeights, naive_scan, scan

ROWS, HEADS, DIM, KEYS, TAPS, SLOTS, BLOCK = 13, 2, 16, 32, 3, 5, 8
CHANNELS = DIM + 2 * KEYS
ENDS = [[3, 4], [8, 1], [11, 3], [13, 2]]  # the last is the slot that is read
# sums of up to 32 fp32 products in another order, and exp and log of another library, over 13 steps
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def case(rule):
    generator = torch.Generator().manual_seed(3)
    num_gates = 1 if rule == "ssd" else 2

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    weights = ScanWeights(
        draw(TAPS + 1, HEADS, CHANNELS),
        draw(HEADS).abs() * 0.1,
        draw(HEADS) if rule == "ssd" else None,
    )
    pools = draw(SLOTS, HEADS, TAPS, CHANNELS), draw(SLOTS, HEADS, KEYS, DIM)
    return pools, draw(ROWS, HEADS, CHANNELS), draw(ROWS, num_gates, HEADS), weights


def i32(rows, device="cpu"):
    return torch.tensor(rows, dtype=torch.int32, device=device)


def run(launch, rule, device, cuts=(0, ROWS), ends=ENDS):
    """Compute the rows in launches between `cuts`; return outputs, taps and states of all slots."""
    (taps, states), inputs, gates, weights = case(rule)
    taps, states, inputs, gates = (each.to(device) for each in (taps, states, inputs, gates))
    weights = ScanWeights(*(None if each is None else each.to(device) for each in weights))
    outputs = []
    for first, end in pairwise(cuts):
        its = [[n - first, slot] for n, slot in ends if first < n <= end and slot != 2]
        pairs = i32([*its, [end - first, 2]], device)
        sequence, rows = i32([[2, 0, 0, len(pairs), first]], device), slice(first, end)
        given = sequence, pairs, inputs[rows], gates[rows], weights
        outputs.append(launch(taps, states, *given, block=BLOCK))
    return torch.cat(outputs).cpu(), taps.cpu(), states.cpu()


def sequential(rule):
    """The state after each token: one launch of the reference for each, and nothing captured."""
    (taps, states), *_ = case(rule)
    for number, slot in ENDS:
        _, its_taps, its_states = run(
            naive_scan, rule, torch.device("cpu"), cuts=range(number + 1), ends=[]
        )
        taps[slot], states[slot] = its_taps[2], its_states[2]
    return taps, states


@pytest.mark.parametrize("dims", [DIM, DIM // 2])
@pytest.mark.parametrize("rule", ["ssd", "delta"])
def test_captured_states_are_those_of_the_sequential_scan_at_every_end(
    rule, dims, device, monkeypatch
):
    monkeypatch.setattr(kernels, "TILE", dims * KEYS)  # with half, two programs share a head
    outputs, taps, states = run(scan, rule, device)
    wanted_taps, wanted_states = sequential(rule)
    assert torch.equal(taps, wanted_taps)
    torch.testing.assert_close(states, wanted_states, **TOLERANCE)
    wanted, taps, states = run(naive_scan, rule, torch.device("cpu"))
    torch.testing.assert_close(outputs, wanted, **TOLERANCE)
    assert torch.equal(taps, wanted_taps)
    assert torch.equal(states, wanted_states)


@pytest.mark.parametrize("launch", [scan, naive_scan])
@pytest.mark.parametrize("rule", ["ssd", "delta"])
def test_bits_do_not_depend_on_where_launches_begin_and_end(rule, launch, device):
    device = device if launch is scan else torch.device("cpu")
    whole = run(launch, rule, device)
    cut = run(launch, rule, device, cuts=(0, 1, 2, 9, 12, ROWS))
    assert all(map(torch.equal, whole, cut))


@pytest.mark.parametrize("fault", ["tap", "decay", "skip", "strength"])
def test_a_planted_fault_is_far_outside_of_the_tolerance(fault, device, monkeypatch):
    rule = "delta" if fault == "strength" else "ssd"
    right = run(scan, rule, device)
    (pools, inputs, gates, weights) = case(rule)
    if fault == "tap":
        weights = weights._replace(conv=weights.conv.roll(1, 0))
    elif fault == "strength":
        gates = gates.flip(1)
    else:
        weights = weights._replace(**{fault: getattr(weights, fault) * 1.01})
    monkeypatch.setitem(globals(), "case", lambda _: (pools, inputs, gates, weights))
    wrong = run(naive_scan, rule, torch.device("cpu"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(right, wrong, **TOLERANCE)


def test_one_launch_writes_all_captures(device, monkeypatch):
    launches = []
    kernel = kernels._scan_kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "_scan_kernel", Counted())
    run(scan, "ssd", device)
    assert len(launches) == 1


def test_states_that_the_kernel_cannot_keep_are_refused(device):
    (taps, states), inputs, gates, weights = case("ssd")
    sequence, ends = i32([[2, 0, 0, 1, 0]]), i32([[ROWS, 2]])
    with pytest.raises(ValueError, match=r"fp32 states .* got .* torch\.float64"):
        scan(taps, states.double(), sequence, ends, inputs, gates, weights, block=BLOCK)


@pytest.mark.parametrize("launch", [scan, naive_scan])
@pytest.mark.parametrize("rule", ["ssd", "delta"])
def test_sequences_of_one_launch_are_as_if_each_were_alone(rule, launch, device, monkeypatch):
    monkeypatch.setattr(kernels, "TILE", DIM // 2 * KEYS)  # two programs share a head
    device = device if launch is scan else torch.device("cpu")
    rows = [slice(1, 5), slice(5, 6), slice(8, ROWS)]
    ends = [[2, 3], [4, 0], [1, 1], [5, 2]]
    sequences = [[0, 1, 0, 2, 0], [1, 5, 2, 3, 5], [2, 8, 3, 4, 40]]

    def started():
        pools, inputs, gates, weights = case(rule)
        weights = ScanWeights(*(None if each is None else each.to(device) for each in weights))
        return *(each.to(device) for each in (*pools, inputs, gates)), weights

    taps, states, inputs, gates, weights = started()
    tables = i32(sequences, device), i32(ends, device)
    out = launch(taps, states, *tables, inputs, gates, weights, block=BLOCK)
    its_taps, its_states, *_ = started()
    wanted = torch.zeros_like(out)
    for (source, _, *its_ends, start), its_rows in zip(sequences, rows, strict=True):
        pairs = ends[slice(*its_ends)]
        alone = i32([[source, 0, 0, len(pairs), start]], device), i32(pairs, device)
        its = inputs[its_rows], gates[its_rows], weights
        wanted[its_rows] = launch(its_taps, its_states, *alone, *its, block=BLOCK)
    assert torch.equal(out, wanted)
    assert torch.equal(taps, its_taps)
    assert torch.equal(states, its_states)
