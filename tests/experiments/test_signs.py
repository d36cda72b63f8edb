"""The study of signs: its claims, what it changes about a run, and when a claim stands."""

from pathlib import Path

import pytest

from experiments.studies import signs
from experiments.studies.signs import CONDITIONS, Claim, Condition, Runs, read_claims
from hicache.cli.schema import config_of
from hicache.results.keys import KNOWN

CLAIMS = read_claims()
LESS = Claim(where="", says="", setting="", metric="", arm="", is_="less", other="")


def found(*values: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return dict(zip(CONDITIONS, values, strict=False))


def test_every_claim_names_a_page_and_a_key() -> None:
    assert len(CLAIMS) >= 30
    for claim in CLAIMS:
        assert (signs.CLAIMS.parent / f"{claim.where}.md").is_file()
        assert claim.metric in KNOWN
        assert claim.arm != claim.other


def test_a_sign_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text("claims: [{is: better}]")
    with pytest.raises(ValueError, match="`is` must be less, more or even, got 'better'"):
        read_claims(path)


@pytest.mark.parametrize(
    ("is_", "values", "sign"),
    [
        ("less", (1, 2), "✓"),
        ("less", (2, 1), "✗"),
        ("more", (2, 1), "✓"),
        ("more", (0, 0), "·"),
        ("even", (1.0, 1.04), "✓"),
        ("even", (1.06, 1.0), "✗"),
        ("even", (2, 2), "·"),
    ],
)
def test_a_claim_has_its_sign_or_not(is_: str, values: tuple[float, float], sign: str) -> None:
    claim = Claim(where="", says="", setting="", metric="", arm="", is_=is_, other="")
    assert claim.holds(*values) == sign


def test_a_claim_stands_if_its_sign_is_kept_as_made_and_turned_nowhere() -> None:
    assert signs.stands(LESS, found((1, 2), (1, 1), (1, 2)))
    assert not signs.stands(LESS, found((1, 2), (2, 1)))
    assert not signs.stands(LESS, found((1, 1), (1, 2)))
    cases = [found((1, 2), (2, 1)), found((2, 1)), found((1, 1), (1, 2))]
    told = "".join(signs.table({LESS: case}) for case in cases)
    assert "| ✓ | ✗ | bound |" in told
    assert "| ✗ | falls |" in told
    assert "| · | ✓ | not asked |" in told
    assert "0 of 1 claims stand" in told


def test_conditions_change_what_they_say_and_nothing_else() -> None:
    runs = Runs(config_of("workload.limit=20"))
    made = runs.config("model=llama3_8b", CONDITIONS["as made"])
    assert (made.workload.limit, made.workload.windows, made.workload.window) == (60, 3, 0)
    slow = runs.config("model=llama3_8b", CONDITIONS["compute −30 %"]).hardware
    known = made.hardware
    assert slow.gemm_bf16.rate == pytest.approx([0.7 * rate for rate in known.gemm_bf16.rate])
    assert slow.mamba_rate.value == pytest.approx(0.7 * known.mamba_rate.value)
    assert slow.weight_bandwidth == known.weight_bandwidth
    half = runs.config("storage.read_gbps=8", CONDITIONS["storage −50 %"]).storage
    assert (half.read_gbps, half.write_gbps) == (4.0, 2.0)
    agentic = runs.config("model=llama3_8b", CONDITIONS["agentic trace"]).workload
    assert (agentic.kind, agentic.limit, agentic.windows) == ("weka_agentic", 8, None)


def test_a_run_that_two_claims_need_is_made_once() -> None:
    runs = Runs(config_of("workload.limit=2"))
    here = Condition(trace="chat", overrides=("workload.num_sessions=2",))
    first = runs.summary("model=llama3_8b scheduler.order=fcfs", here)
    assert runs.summary("model=llama3_8b", here) is first
    assert runs.summary("model=llama3_8b compat=hicache", here) is not first


def test_the_study_asks_every_claim_under_every_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = dict.fromkeys(KNOWN, 1.0)
    monkeypatch.setattr(Runs, "summary", lambda *_: made)
    signs.carry_out(config_of("workload.limit=2"), tmp_path)
    assert f"0 of {len(CLAIMS)} claims stand" in capsys.readouterr().out
    lines = (tmp_path / "signs.csv").read_text().splitlines()
    assert len(lines) == 1 + len(CLAIMS) * len(CONDITIONS)
