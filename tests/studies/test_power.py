"""The study of how often paired comparisons claim a difference between configurations."""

import pytest

from experiments.studies import power


def told(low, high):
    ends = {f"{power.TTFT} ratio low": low, f"{power.TTFT} ratio high": high}
    others = dict.fromkeys(power.VALUES, 1.1) | {f"{power.TTFT} ratio": 1.0, LEAST: 0.04}
    hits = {f"{power.HITS} {end}": -0.1 for end in ("low", "high")}
    return dict.fromkeys((power.EQUAL, power.SCALED, power.LESS), others | hits | ends)


LEAST = f"{power.TTFT} least effect"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(power, "KEPT", tmp_path / "power.csv")
    monkeypatch.setattr(power, "OUT", tmp_path / "runs")
    return tmp_path


def test_intervals_of_a_difference_without_zero_are_counted_as_claims(kept, monkeypatch):
    lows, asked = (0.99, 0.98, 0.96, 0.95, 1.01), []

    def compared(name, number):
        asked.append(number)
        (power.OUT / name / f"{number}").mkdir(parents=True)
        return told(lows[number], 1 / lows[number] if lows[number] < 1 else 1.2)

    monkeypatch.setattr(power, "compared", compared)
    power.found_of("chat", 3)
    row = power.rows_of("chat", power.found_of("chat", 5))[0]
    assert asked == [0, 1, 2, 3, 4]
    assert (row["comparisons"], row["longer"], row["shorter"]) == (5, 1, 0)
    assert (row["effect named"], row["effect found by 80 %"]) == ("4.0%", "5.3%")
    assert (row["claims on p95"], row["claims on hits"]) == (5, 5)


def test_comparisons_share_no_run():
    for name in power.CASES:
        blocks = [power.blocks_of(name, number) for number in range(5)]
        assert len({block for each in blocks for block in each}) == sum(map(len, blocks))
    assert power.blocks_of("weka_agentic", 5) != power.blocks_of("weka_agentic", 0)


def test_a_comparison_makes_its_own_runs_and_an_arm_with_a_scaled_ttft(kept, monkeypatch):
    monkeypatch.setitem(power.CASES, "chat", ("workload.num_sessions=6", (10, 10, 1)))
    found = power.compared("chat", 0)
    equal, scaled = (found[arm][f"{power.TTFT} ratio"] for arm in (power.EQUAL, power.SCALED))
    assert scaled / equal == pytest.approx(power.LONGER)
    assert found[power.LESS]["cache.host_gib"] == 1
    assert len(list(power.OUT.glob("chat/0/*/*/summary.json"))) == 4 * power.SEEDS
