"""Claims of the pages about kernels, checked against the stored benches of two GPUs."""

import json
from pathlib import Path

import pytest

from experiments.gpu.claims import CLAIMS, judged, measured

RESULTS = Path(__file__).parents[2] / "experiments/results"
KNOWN = {"h200-2026-11-26": ["the scan is at least 10 times slower than a chunked one"]}


@pytest.mark.parametrize("machine", ["h100-2026-11-26", "h200-2026-11-26"])
def test_a_stored_bench_confirms_every_claim_except_the_known_ones(machine):
    numbers = dict[str, float]()
    for name in ("bench", "contest"):
        numbers |= measured(json.loads((RESULTS / machine / f"{name}.json").read_text()))
    verdicts = {claim.sentence: judged(claim, numbers)[1] for claim in CLAIMS}
    assert None not in verdicts.values()
    assert [each for each, holds in verdicts.items() if not holds] == KNOWN.get(machine, [])


def test_a_claim_is_refuted_by_a_ratio_beyond_its_limits():
    claim = next(claim for claim in CLAIMS if claim.over)
    assert judged(claim, {claim.of: claim.least, claim.over: 1.0})[1] is True
    assert judged(claim, {claim.of: claim.least * 0.99, claim.over: 1.0})[1] is False
    assert judged(claim, {})[1] is None
