"""Recurrent layers by flash-linear-attention, in Triton's interpreter."""

import pytest
import torch

from hicache.executor.real import fla_scan as kernels
from hicache.executor.real import runtime
from hicache.executor.real.plane import REFERENCE
from hicache.kernels.scan import ScanWeights, naive_scan
from tests.executor.fla_ranges import interpret
from tests.executor.mixes import run_mix

pytest.importorskip("fla", reason="fla-core is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

HEADS, DIM, KEYS, TAPS, SLOTS, ROWS = 2, 16, 32, 3, 8, 192
RULES = pytest.mark.parametrize("rule", ["delta", "ssd"])


@pytest.fixture
def fla_scan(monkeypatch):
    interpret(monkeypatch)
    return kernels.fla_scan


def run(launch, rule, sequences, ends, rows=slice(0, ROWS), dtype=torch.float32, pools=None):
    """Compute one layer; return outputs, taps and states."""
    generator, channels = torch.Generator().manual_seed(5), DIM + 2 * KEYS

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    skip = draw(HEADS) if rule == "ssd" else None
    weights = ScanWeights(draw(TAPS + 1, HEADS, channels) / 2, draw(HEADS).abs() * 0.1, skip)
    taps, states = draw(SLOTS, HEADS, TAPS, channels).to(dtype), draw(SLOTS, HEADS, KEYS, DIM)
    taps, states = pools or (taps, states)
    gates = draw(ROWS, 1 if rule == "ssd" else 2, HEADS).to(dtype)[rows]
    inputs = draw(ROWS, HEADS, channels).to(dtype)[rows]
    tables = [torch.tensor(each, dtype=torch.int32) for each in (sequences, ends)]
    return launch(taps, states, *tables, inputs, gates, weights, block=8), taps, states


@RULES
def test_outputs_and_states_of_fla_equal_those_of_the_reference(rule, fla_scan):
    """Two sequences; one of the three states captured in the first is at no multiple of 64."""
    sequences = [[2, 0, 0, 3, 0], [5, 130, 3, 4, 0]]
    given = rule, sequences, [[64, 4], [81, 1], [120, 2], [60, 5]]
    got, wanted = run(fla_scan, *given), run(naive_scan, *given)
    for each, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(each, right, rtol=0, atol=2e-6 * float(right.abs().max()))
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("delta", torch.float16),
        ("ssd", torch.float32),
        pytest.param("delta", torch.float32, marks=pytest.mark.soak),
        pytest.param("ssd", torch.float16, marks=pytest.mark.soak),
    ],
)
def test_states_at_multiples_of_64_have_the_bits_of_a_call_that_ends_there(rule, dtype, fla_scan):
    whole, taps, states = run(
        fla_scan, rule, [[2, 0, 0, 2, 0]], [[64, 1], [128, 3]], slice(0, 128), dtype
    )
    for end, slot in ((64, 1), (128, 3)):
        rows = slice(0, end)
        # the longer one is the whole, but for the state that is captured on its way
        cut = run(fla_scan, rule, [[2, 0, 0, 1, 0]], [[end, 6]], rows, dtype)
        assert torch.equal(states[slot], cut[2][6])
        assert torch.equal(taps[slot], cut[1][6])
        assert torch.equal(whole[rows], cut[0])
    rest = [[1, 0, 0, 1, 64]], [[64, 6]], slice(64, 128), dtype
    after = run(fla_scan, rule, *rest, pools=(taps, states))
    assert torch.equal(whole[64:], after[0])
    assert torch.equal(states[3], states[6])


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(fla_scan):
    both = run(
        fla_scan, "delta", [[2, 0, 0, 2, 0], [5, 100, 2, 3, 0]], [[64, 4], [100, 2], [77, 5]]
    )
    alone = run(fla_scan, "delta", [[5, 0, 0, 1, 0]], [[77, 5]], slice(100, 177))
    assert torch.equal(both[0][100:177], alone[0])
    assert torch.equal(both[2][5], alone[2][5])


def test_every_fla_kernel_has_one_autotune_configuration(fla_scan):
    found = kernels.autotuned()
    assert len(found) > 4
    assert {len(each.configs) for each in found} == {1}


def test_fla_kernels_on_a_cpu_are_refused():
    with pytest.raises(ValueError, match="fla needs a GPU"):
        runtime._plane("fla", torch.device("cpu"))


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_hits_change_logits_only_by_rounding(most, fla_scan):
    """Captured states, evictions and copies; a request that decodes has chunks of its own."""
    verdict = run_mix(14, plane=REFERENCE._replace(scan=fla_scan), most=most).verdict
    assert verdict.num_checked == most
    assert verdict.num_agree == verdict.num_tokens
    assert 0 < verdict.error < 1e-4
