import csv
import json
import re

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats

from hicache.cli import compare
from hicache.cli.tables.groups import differing_keys, group_runs, load_runs
from hicache.cli.tables.intervals import difference, ratio
from hicache.cli.tables.paired import Pairs
from hicache.cli.tables.request_metrics import METRICS
from hicache.clock import SECOND_NS
from hicache.results.metrics import Status, summarize
from hicache.results.requests_file import write_requests
from hicache.results.tracking import write_json
from hicache.results.verdict import RHOS


def write_run(path, records, measures, *, stop, seed=0, window=0, kind="trace", **knobs):
    path.mkdir(parents=True)
    config = {
        "name": "stops",
        "seed": seed,
        "workload": {"window": window, "kind": kind},
        "prefetch": {"stop": stop, **knobs},
    }
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    write_json(path / "summary.json", summarize(records, measures))
    write_requests(path, records)


@pytest.fixture
def measures(measures):
    """Of runs whose latencies may be compared."""
    return {**measures, **{f"load/rho_{name}": 0.5 for name in RHOS}}


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


def test_two_arms_may_differ_in_any_number_of_knobs(tmp_path, measures, late, capsys):
    arms = (("best_effort", 64, "fit"), ("timeout", 256, "abandon"), ("timeout", 64, "abandon"))
    for number, (stop, threshold, cut) in enumerate(arms):
        records = [late(request, number) for request in range(30)]
        knobs = {"stop": stop, "threshold": threshold, "cut": cut}
        write_run(tmp_path / str(number), records, measures, **knobs)
    paths = [str(tmp_path / str(number)) for number in range(len(arms))]
    for count in (2, 3):
        compare.main([*paths[:count], "--paired", "--json"])
        found = json.loads(capsys.readouterr().out)
        means = [each["request/ttft_s_mean difference"] for each in found[1:]]
        assert means == pytest.approx([1, 2][: count - 1])
        assert [each["prefetch.cut"] for each in found] == ["fit", "abandon", "abandon"][:count]


def windows_of(path, measures, late, delays, *, turns=1):
    """Two runs of each window, the second with these delays [windows, sessions]."""
    for window, of_sessions in enumerate(delays):
        sessions = np.repeat(np.arange(len(of_sessions)), turns).tolist()
        for stop, factor in (("best_effort", 0), ("timeout", 1)):
            records = [
                late(n, factor * of_sessions[session], session_id=session)
                for n, session in enumerate(sessions)
            ]
            write_run(path / f"{stop}{window}", records, measures, stop=stop, window=window)


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
    windows_of(tmp_path, measures, late, np.full((8, 5), 2.0))
    pairs = pairs_in(tmp_path)
    for metric in ("request/ttft_s_mean", "request/queue_s_p95"):
        difference = pairs.differences([metric])[metric]
        assert difference.middle == pytest.approx(2)
        assert difference.absolute.interval == pytest.approx((2, 2))
        assert difference.absolute.least == pytest.approx(0)
        assert difference.absolute.needed == 3


def test_an_interval_is_that_of_a_paired_t_test_of_logarithms(tmp_path, measures, late):
    # all sessions of a window share their delay, so ten windows say as much as ten numbers
    delays = 5 + np.random.default_rng(1).normal(size=10)
    windows_of(tmp_path, measures, late, np.repeat(delays[:, None], 6, axis=1))
    found = pairs_in(tmp_path).differences(["request/ttft_s_mean"])["request/ttft_s_mean"]
    logs = np.log((found.baseline + delays) / found.baseline)
    wanted = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.relative.interval == pytest.approx(np.exp(wanted) - 1)
    assert found.relative.middle == pytest.approx(np.exp(logs.mean()) - 1)
    wanted = stats.ttest_1samp(delays, 0).confidence_interval(0.95)
    assert found.absolute.interval == pytest.approx(tuple(wanted))


def test_an_effect_of_the_least_size_is_found_in_eighty_of_a_hundred():
    random = np.random.default_rng(2)
    for num_blocks in (3, 8):
        base = np.exp(random.normal(size=(1_000, num_blocks)))
        noise = np.exp(random.normal(scale=0.05, size=base.shape))
        alike = [ratio(one, one * change) for one, change in zip(base, noise, strict=True)]
        assert np.mean([each.interval[0] > 0 or each.interval[1] < 0 for each in alike]) < 0.07
        # of the true spread: that of few blocks is an estimate itself
        factor = np.exp(np.sqrt(np.mean([np.log(1 + each.least) ** 2 for each in alike])))
        better = [
            ratio(one, one * change * factor) for one, change in zip(base, noise, strict=True)
        ]
        assert np.mean([each.interval[0] > 0 for each in better]) == pytest.approx(0.8, abs=0.04)


def test_the_blocks_for_five_percent_follow_from_the_spread():
    logs = np.tile([-0.1, 0.1], 3)
    spread = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    wanted = (spread * logs.std(ddof=1) / np.log(1.05)) ** 2
    assert ratio(np.ones(6), np.exp(logs)).needed == pytest.approx(wanted + 2, abs=1)
    assert difference(np.ones(6), 1 + logs * 1e-9).needed == 3


def test_a_slow_window_does_not_hide_what_all_windows_show(tmp_path, measures, late):
    # the policy takes 10 % of each window's time; one window is a hundred times slower
    base = np.array([0.1, 0.2, 0.15, 0.3, 0.12, 0.25, 0.2, 12.0])
    other = base * (0.9 + 0.01 * np.random.default_rng(5).normal(size=8))
    found = ratio(base, other)
    assert found.interval[1] < -0.08
    assert difference(base, other).interval[1] > 0


@pytest.mark.parametrize(
    ("windows", "lack"),
    [
        (2, "2 window(s) or seed(s) (workload.windows, seed), at least 3 are needed"),
        (1, "1 window(s) or seed(s)"),
    ],
)
def test_of_too_few_there_is_no_interval_and_the_table_says_why(
    tmp_path, measures, late, capsys, windows, lack
):
    windows_of(tmp_path, measures, late, np.full((windows, 3), 0.5))
    compare.main([str(tmp_path), "--paired", "--metric", "request/ttft_s_p50"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "No interval: " in printed
    assert lack in printed


def test_seeds_of_one_window_give_an_interval_for_it_alone(tmp_path, measures, late, capsys):
    for seed in range(3):
        for place, stop in enumerate(("best_effort", "timeout")):
            records = [late(number, 1 + seed / 10 + place) for number in range(6)]
            write_run(tmp_path / f"{stop}{seed}", records, measures, stop=stop, seed=seed)
    compare.main([str(tmp_path), "--paired", "--metric", "request/ttft_s_mean"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "intervals hold for this part only" in printed
    assert "Smallest effects that 80% of such comparisons find: TTFT mean, s " in printed


@pytest.mark.parametrize(("kind", "is_one_trace"), [("trace", True), ("chat", False)])
def test_seeds_are_paired_with_themselves(tmp_path, measures, late, kind, *, is_one_trace):
    for seed in (0, 1):
        for place, stop in enumerate(("best_effort", "timeout")):
            records = [late(number, seed + place) for number in range(6)]
            path = tmp_path / f"{seed + 2 * place}"
            write_run(path, records, measures, stop=stop, seed=seed, kind=kind)
    pairs = pairs_in(tmp_path)
    assert (len(pairs), pairs.num_blocks, pairs.blocks) == (12, 2, "seed")
    assert pairs.is_one_trace is is_one_trace
    found = pairs.differences(["request/ttft_s_mean"])["request/ttft_s_mean"]
    assert found.middle == pytest.approx(1)


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
    with pytest.raises(ValueError, match="served different requests"):
        pairs_in(tmp_path)


@pytest.mark.parametrize("form", ["--json", "--markdown", "--paired"])
def test_a_paired_comparison_is_printed(tmp_path, measures, late, capsys, form):
    before, after = ([late(number, delay) for number in range(9)] for delay in (0, 0.5))
    two_runs(tmp_path, measures, before, after)
    compare.main([str(tmp_path), "--paired", form, "--metric", "request/ttft_s_mean"])
    text = capsys.readouterr().out
    if form == "--json":
        _, row = json.loads(text)
        assert row["prefetch.stop"] == "timeout"
        assert row["request/ttft_s_mean difference"] == pytest.approx(0.5)
    else:
        ttft_s = np.mean([each.first_token_ns - each.arrival_ns for each in before]) / SECOND_NS
        (percent,) = re.findall(r"\+([\d.]+)%", text)
        assert float(percent) == pytest.approx(100 * 0.5 / ttft_s)


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
    assert other["requests"] == "9"


def test_overloaded_rows_are_marked(tmp_path, measures, late, capsys):
    busy = {**measures, "load/rho_gpu": 0.95}
    two_runs(tmp_path, busy, [late(0, 0)], [late(0, 1)])
    compare.main([str(tmp_path), "--paired", "--metric", "request/ttft_s_mean"])
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("timeout")]
    assert line.split()[1:3] == ["1", "abcd"]  # with ρ 0.95 as all its TTFT in one minute


@pytest.mark.parametrize("busy", ["best_effort", "timeout"])
def test_no_latency_of_overloaded_requests_is_compared(tmp_path, measures, late, capsys, busy):
    for stop in ("best_effort", "timeout"):
        load = {"load/rho_gpu": 0.95 if stop == busy else 0.5}
        for window in range(8):
            records = [late(number, stop == busy) for number in range(6)]
            path = tmp_path / f"{stop}{window}"
            write_run(path, records, {**measures, **load}, stop=stop, window=window)
    keys = ("request/ttft_s_mean", "cache/token_hit_rate")
    told = [str(tmp_path), "--paired", *(f"--metric={key}" for key in keys)]
    compare.main(told)
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("timeout")]
    assert line.count("–") == 1  # its TTFT
    compare.main([*told, "--json"])
    first, row = json.loads(capsys.readouterr().out)
    ttft, hits = ([row[f"{key} {part}"] for part in ("difference", "low", "high")] for key in keys)
    assert first["request/ttft_s_mean of the first row"] > 0  # the latency itself stays
    assert ttft == [None] * 3
    assert hits == [0, 0, 0]


def test_what_belongs_to_whole_runs_is_compared_window_by_window(tmp_path, measures, late, capsys):
    key = "transfer/storage_write_bytes"
    written = {"best_effort": range(10, 18), "timeout": range(20, 36, 2)}
    for stop, counts in written.items():
        for window, count in enumerate(counts):
            records = [late(number, 0, session_id=number) for number in range(3)]
            counted = {**measures, key: count}
            write_run(tmp_path / f"{stop}{window}", records, counted, stop=stop, window=window)
    compare.main([str(tmp_path), "--paired", "--metric", key, "--json"])
    _, row = json.loads(capsys.readouterr().out)
    assert (row[f"{key} of the first row"], row[f"{key} difference"]) == (13.5, 13.5)
    half = 2.365 * np.std(range(10, 18), ddof=1) / np.sqrt(8)
    interval = [row[f"{key} low"], row[f"{key} high"]]
    assert interval == pytest.approx([13.5 - half, 13.5 + half], rel=0.05)
    assert row["windows"] == 8


def test_tokens_of_the_requests_that_both_finished_are_compared(tmp_path, measures, late):
    first = [late(n, 0) for n in range(3)]
    second = [late(n, 0, host_hit_len=0, computed_len=500) for n in range(2)]
    two_runs(tmp_path, measures, first, second)
    found = pairs_in(tmp_path).differences(["cache/computed_tokens"])["cache/computed_tokens"]
    assert (found.baseline, found.other) == (600, 1000)


@pytest.mark.parametrize(
    ("metric", "complaint"),
    [("load/rho", "has no metric load/rho"), (None, "at least two configurations")],
)
def test_what_cannot_be_paired_is_one_sentence(tmp_path, measures, late, capsys, metric, complaint):
    two_runs(tmp_path, measures, [late(0, 0)], [late(0, 0)])
    paths = [str(tmp_path)] if metric else [str(tmp_path / "0")]
    with pytest.raises(SystemExit, match="2"):
        compare.main([*paths, "--paired", *(["--metric", metric] if metric else [])])
    assert complaint in capsys.readouterr().err
