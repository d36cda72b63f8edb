"""The study of how often paired comparisons claim a difference between configurations."""

import pytest

from experiments.studies import power

TTFT = "request/ttft_s_mean"


def told(low, high):
    values = {f"{TTFT} ratio low": low, f"{TTFT} ratio high": high, f"{TTFT} ratio": 1.0}
    values |= {f"{metric} ratio {end}": 1.1 for metric in power.METRICS[1:] for end in ENDS}
    values |= {f"{metric} {end}": -0.1 for metric in power.METRICS[1:] for end in ENDS}
    return dict.fromkeys((power.EQUAL, power.SCALED, power.LESS), values | {LEAST: 0.04})


ENDS, LEAST = ("low", "high"), f"{TTFT} least effect"


def test_intervals_of_a_difference_without_zero_are_counted_as_claims():
    comparisons = [told(low, 1 / low) for low in (0.99, 0.98, 0.96, 0.95)] + [told(1.01, 1.2)]
    row = power.rows_of("chat", comparisons)[0]
    assert (row["comparisons"], row["longer"], row["shorter"]) == (5, 1, 0)
    assert (row["effect named"], row["effect found by 80 %"]) == ("4.0%", "5.3%")
    assert (row["claims on p95"], row["claims on hits"]) == (5, 5)


def test_comparisons_share_no_run():
    for name in power.CASES:
        blocks = [power.blocks_of(name, number) for number in range(5)]
        assert len({block for each in blocks for block in each}) == sum(map(len, blocks))
    assert power.blocks_of("weka_agentic", 5) != power.blocks_of("weka_agentic", 0)


def test_a_comparison_makes_its_own_runs_and_an_arm_with_a_scaled_ttft(tmp_path, monkeypatch):
    monkeypatch.setattr(power, "OUT", tmp_path)
    monkeypatch.setitem(power.CASES, "chat", ("workload.num_sessions=6", (10, 10, 1)))
    found = power.compared("chat", 0)
    equal, scaled = (found[arm][f"{TTFT} ratio"] for arm in (power.EQUAL, power.SCALED))
    assert scaled / equal == pytest.approx(power.LONGER)
    assert found[power.LESS]["cache.host_gib"] == 1
    assert len(list(tmp_path.glob("chat/0/*/*/summary.json"))) == 4 * power.SEEDS
