"""Claims about kernels, decided by the lines of a bench."""

import json
import math
import sys
from pathlib import Path

import pytest

from experiments.gpu import claims
from experiments.gpu.claims import CLAIMS, Claim

RESULTS = Path(claims.__file__).parents[1] / "results"
BENCH = {
    "records": [
        {"op": "load", "case": "plain", "gb_per_s": 40.0, "parameters": {}},
        {"op": "ceiling", "case": "all", "gb_per_s": 50.0, "parameters": {}},
        {"op": "sweep", "case": "engine", "gb_per_s": 5.0, "parameters": {"piece_bytes": 4096}},
    ],
    "goals": [
        {"what": "a goal", "got": 1.2},
        {"what": "not timed", "got": None},
    ],
    "notes": {"a note": 3.0},
}


@pytest.mark.parametrize(
    ("of", "over", "ratio", "holds"),
    [
        ("load: plain", "ceiling: all", 0.8, True),
        ("sweep: engine 4096", "ceiling: all", 0.1, False),
        ("a goal", "", 1.2, False),
        ("not timed", "", math.nan, None),
        ("load: plain", "missing", math.nan, None),
    ],
)
def test_a_claim_holds_between_its_limits(of, over, ratio, holds):
    claim = Claim("a sentence", "a page", of, over, 0.5, 1.0)
    got, verdict = claims.judged(claim, claims.measured(BENCH))
    assert got == pytest.approx(ratio, nan_ok=True)
    assert verdict is holds


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_the_measurements_of_the_repository_decide_every_claim(machine):
    bench = json.loads((RESULTS / f"{machine}-2026-11-26" / "bench.json").read_text())
    verdicts = {claim.sentence: claims.judged(claim, claims.measured(bench))[1] for claim in CLAIMS}
    assert None not in verdicts.values()
    # flash-linear-attention was timed with its launches, which took the host longer there
    late = {"the scan is at least 10 times slower than a chunked one"}
    fallen = {sentence for sentence, holds in verdicts.items() if not holds}
    assert fallen == (late if machine == "h200" else set())


def test_without_a_bench_every_claim_is_listed_with_what_decides_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["claims"])
    assert claims.main() == 0
    printed = capsys.readouterr().out
    assert all(claim.sentence in printed and claim.of in printed for claim in CLAIMS)
