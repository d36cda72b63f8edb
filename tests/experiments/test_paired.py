import csv
import json

import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments import compare
from experiments.tables.groups import differing_keys, group_runs, load_runs
from experiments.tables.paired import METRICS, Pairs, Percentile
from hicache.clock import SECOND_NS
from hicache.results.metrics import Status, summarize
from hicache.results.report import write_requests
from hicache.results.tracking import write_json


def write_run(path, records, measures, *, stop, seed=0):
    path.mkdir(parents=True)
    config = {"name": "stops", "seed": seed, "prefetch": {"stop": stop}}
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    write_json(path / "summary.json", summarize(records, measures))
    write_requests(path / "requests.parquet", records)


@pytest.fixture
def late(make_record):
    """Makes a request whose first token comes so many seconds later than that of the others."""

    def made(number, delay_s, **changes):
        record = make_record(number, **changes)
        delay_ns = round(delay_s * SECOND_NS)
        return make_record(
            number,
            first_token_ns=record.first_token_ns + delay_ns,
            finish_ns=record.finish_ns + delay_ns,
            queue_ns=record.queue_ns + delay_ns,
            **changes,
        )

    return made


def pairs_in(path):
    runs = load_runs([path])
    return Pairs(*group_runs(runs, differing_keys(runs)))


def two_runs(path, measures, first, second):
    write_run(path / "0", first, measures, stop="best_effort")
    write_run(path / "1", second, measures, stop="timeout")
    return path


def test_metrics_of_all_requests_are_those_of_the_summary(tmp_path, measures, late):
    random = np.random.default_rng(3)
    records = [
        late(number, delay, output_len=int(length))
        for number, (delay, length) in enumerate(
            zip(random.exponential(size=99), random.integers(1, 9, size=99), strict=True)
        )
    ]
    two_runs(tmp_path, measures, records, [late(number, 50) for number in range(99)])
    found = pairs_in(tmp_path).differences(list(METRICS))
    summary = json.loads((tmp_path / "0" / "summary.json").read_text())
    assert {key: value.baseline for key, value in found.items()} == pytest.approx(
        {key: summary[key] for key in METRICS}
    )


def test_the_same_delay_for_all_is_certain(tmp_path, measures, late):
    shifted = [late(number, 2) for number in range(40)]
    two_runs(tmp_path, measures, [late(number, 0) for number in range(40)], shifted)
    pairs = pairs_in(tmp_path)
    for metric in ("request/ttft_s_mean", "request/queue_s_p95"):
        difference = pairs.differences([metric])[metric]
        assert (difference.low, difference.middle, difference.high) == pytest.approx((2, 2, 2))
    assert (pairs.sooner(), pairs.later()) == (0, 1)


def test_the_interval_is_as_wide_as_sessions_differ(tmp_path, measures, late):
    # ten requests of a session share their delay, so 200 sessions say as much as 200 requests
    delays = 5 + np.random.default_rng(1).normal(size=200)
    sessions = np.repeat(np.arange(200), 10).tolist()
    before = [late(n, 0, session_id=s) for n, s in enumerate(sessions)]
    after = [late(n, delays[s], session_id=s) for n, s in enumerate(sessions)]
    found = pairs_in(two_runs(tmp_path, measures, before, after)).differences(
        ["request/ttft_s_mean"]
    )["request/ttft_s_mean"]
    assert found.middle == pytest.approx(delays.mean())
    expected = 2 * 1.96 * delays.std() / np.sqrt(200)
    assert found.high - found.low == pytest.approx(expected, rel=0.1)
    assert found.low < found.middle < found.high


def test_drawing_a_request_twice_counts_it_twice():
    values = np.array([3.0, 1.0, 2.0])
    weights = np.array([[1.0, 1, 1], [0, 3, 1], [2, 0, 0]])
    assert Percentile(values, 50).under(weights).tolist() == [2, 1, 3]


def test_seeds_are_paired_with_themselves(tmp_path, measures, late):
    for seed in (0, 1):
        base = [late(number, seed) for number in range(6)]
        other = [late(number, seed + 1) for number in range(6)]
        write_run(tmp_path / f"{seed}", base, measures, stop="best_effort", seed=seed)
        write_run(tmp_path / f"{seed + 2}", other, measures, stop="timeout", seed=seed)
    pairs = pairs_in(tmp_path)
    assert (len(pairs), pairs.num_seeds, pairs.num_sessions) == (12, 2, 3)
    found = pairs.differences(["request/ttft_s_mean"])["request/ttft_s_mean"]
    assert (found.low, found.high) == pytest.approx((1, 1))


def test_requests_that_one_side_rejected_are_left_out_and_counted(
    tmp_path, measures, make_record, late, capsys
):
    rejected = make_record(
        0,
        status=Status.rejected,
        first_token_ns=None,
        finish_ns=None,
        output_len=0,
        **dict.fromkeys(("device_hit_len", "host_hit_len", "storage_hit_len", "computed_len"), 0),
        **dict.fromkeys(("queue_ns", "storage_wait_ns", "load_back_ns", "prefill_ns"), 0),
    )
    two_runs(tmp_path, measures, [late(0, 0), late(1, 0)], [rejected, late(1, 1)])
    pairs = pairs_in(tmp_path)
    assert (len(pairs), pairs.num_unpaired) == (1, 1)
    compare.main([str(tmp_path), "--paired"])
    assert "1 requests (50.0%) finished on one side only" in capsys.readouterr().out


def test_other_requests_are_refused(tmp_path, measures, late):
    two_runs(tmp_path, measures, [late(0, 0)], [late(0, 0, session_id=7)])
    with pytest.raises(ValueError, match="did not serve the same requests"):
        pairs_in(tmp_path)


@pytest.mark.parametrize("form", ["--json", "--markdown", "--latex", "--paired"])
def test_a_paired_comparison_is_printed(tmp_path, measures, late, capsys, form):
    before, after = ([late(number, delay) for number in range(9)] for delay in (0, 0.5))
    two_runs(tmp_path, measures, before, after)
    compare.main([str(tmp_path), "--paired", form, "--metric", "request/ttft_s_mean"])
    text = capsys.readouterr().out
    if form == "--json":
        [row] = json.loads(text)
        assert row["settings"] == {"prefetch.stop": "timeout"}
        assert row["metrics"]["request/ttft_s_mean"]["difference"] == pytest.approx(0.5)
    else:
        assert "+0.500 [+0.500, +0.500]" in text


def test_a_paired_comparison_as_csv_keeps_values_and_differences_apart(
    tmp_path, measures, late, capsys
):
    before, after = ([late(number, delay) for number in range(9)] for delay in (0, 0.5))
    two_runs(tmp_path, measures, before, after)
    compare.main([str(tmp_path), "--paired", "--csv", "--metric", "request/ttft_s_mean"])
    first, other = csv.DictReader(capsys.readouterr().out.splitlines())
    key = "request/ttft_s_mean"
    assert first[f"{key} difference"] == ""
    assert first[f"{key} of the first row"] == other[f"{key} of the first row"]
    assert float(other[f"{key} difference"]) == pytest.approx(0.5)
    assert (other["requests"], other["later"]) == ("9", "1.0")


def test_overloaded_rows_are_marked(tmp_path, measures, late, capsys):
    busy = {**measures, "load/rho_gpu": 0.95}
    two_runs(tmp_path, busy, [late(0, 0)], [late(0, 1)])
    compare.main([str(tmp_path), "--paired", "--metric", "request/ttft_s_mean"])
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("timeout")]
    assert line.split()[1:3] == ["1", "abcd"]  # with ρ 0.95 as all its TTFT in one minute


def test_what_belongs_to_whole_runs_is_compared_run_by_run(tmp_path, measures, late, capsys):
    key = "transfer/storage_write_bytes"
    for seed, (base, other) in enumerate(((10, 12), (20, 26))):
        for stop, written in (("best_effort", base), ("timeout", other)):
            counts = {**measures, key: written}
            write_run(tmp_path / f"{stop}{seed}", [late(0, 0)], counts, stop=stop, seed=seed)
    compare.main([str(tmp_path), "--paired", "--metric", key, "--json"])
    [row] = json.loads(capsys.readouterr().out)
    told = {"baseline": 15, "other": 19, "difference": 4, "low": 2, "high": 6, "of": "runs"}
    assert row["metrics"][key] == told
    compare.main([str(tmp_path), "--paired", "--metric", key])
    assert "+4.00 (+2.00, +6.00)" in capsys.readouterr().out


def test_of_one_seed_whole_runs_have_no_range(tmp_path, measures, late, capsys):
    two_runs(tmp_path, measures, [late(0, 0)], [late(0, 1)])
    compare.main([str(tmp_path), "--paired", "--metric", "load/rho_gpu"])
    assert "(0, 0)" not in capsys.readouterr().out


def test_tokens_of_the_requests_that_both_finished_are_compared(tmp_path, measures, late):
    first = [late(n, 0) for n in range(3)]
    second = [late(n, 0, host_hit_len=0, computed_len=500) for n in range(2)]
    two_runs(tmp_path, measures, first, second)
    found = pairs_in(tmp_path).differences(["cache/computed_tokens"])["cache/computed_tokens"]
    assert (found.baseline, found.other) == (600, 1000)
    assert not found.is_of_runs


@pytest.mark.parametrize(
    ("metric", "complaint"),
    [("load/rho", "has no metric load/rho"), (None, "needs two configurations")],
)
def test_what_cannot_be_paired_is_one_sentence(tmp_path, measures, late, capsys, metric, complaint):
    two_runs(tmp_path, measures, [late(0, 0)], [late(0, 0)])
    paths = [str(tmp_path)] if metric else [str(tmp_path / "0")]
    with pytest.raises(SystemExit, match="2"):
        compare.main([*paths, "--paired", *(["--metric", metric] if metric else [])])
    assert complaint in capsys.readouterr().err
