"""Paired comparisons: which requests are paired, the intervals, and the tables."""

import csv
import json
import re
from itertools import product

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
from hicache.results.metrics import TTFT_PARTS, Status, summarize
from hicache.results.requests_file import write_requests
from hicache.results.tracking import write_json
from hicache.results.verdict import RHOS

TTFT = "request/ttft_s_mean"
STOPS = ("best_effort", "timeout")


@pytest.fixture
def late(make_record):
    """Return a function that makes request `number`, whose first token comes `delay_s` s later."""

    def made(number, delay_s, **changes):
        record = make_record(number, **changes)
        delay_ns = round(delay_s * SECOND_NS)
        times = ("first_token_ns", "finish_ns", "queue_ns")
        delayed = {name: getattr(record, name) + delay_ns for name in times}
        return make_record(number, **delayed, **changes)

    return made


@pytest.fixture
def write_run(tmp_path, measures):
    """Return a function that writes the directory of a run that is not overloaded by default."""
    measures |= {f"load/rho_{name}": 0.5 for name in RHOS}

    def write(records, *, stop, seed=0, window=0, kind="trace", counted=None, **knobs):
        path = tmp_path / f"{len(list(tmp_path.iterdir())):02}"
        path.mkdir()
        workload = {"slice": f"{window}/10", "kind": kind}
        config = {"name": "stops", "seed": seed, "workload": workload}
        config["prefetch"] = {"stop": stop, **knobs}
        OmegaConf.save(OmegaConf.create(config), path / "config.yaml")
        write_json(path / "summary.json", summarize(records, measures | (counted or {})))
        write_requests(path, records)

    return write


@pytest.fixture
def two_runs(write_run, late):
    """Return a function that writes two runs, by default of 9 requests, the second 0.5 s late."""

    def write(*runs, **knobs):
        runs = runs or [[late(number, delay) for number in range(9)] for delay in (0, 0.5)]
        for stop, records in zip(STOPS, runs, strict=True):
            write_run(records, stop=stop, **knobs)

    return write


@pytest.fixture
def windows(write_run, late):
    """Return a function that writes two runs per window: `delays` [windows, sessions] s apart."""

    def write(delays):
        for (window, row), (factor, stop) in product(enumerate(delays), enumerate(STOPS)):
            records = [late(n, factor * delay, session_id=n) for n, delay in enumerate(row)]
            write_run(records, stop=stop, window=window)

    return write


@pytest.fixture
def pairs(tmp_path):
    def load():
        runs = load_runs([tmp_path])
        return Pairs(*group_runs(runs, differing_keys(runs)))

    return load


@pytest.fixture
def printed(tmp_path, capsys):
    """Return a function that runs `hicache compare --paired` and returns the output."""

    def call(*options, paths=(tmp_path,)):
        compare.main([*map(str, paths), "--paired", *options])
        return capsys.readouterr().out

    return call


def test_paired_runs_may_differ_in_any_number_of_settings(tmp_path, write_run, late, printed):
    arms = (("best_effort", 64, "fit"), ("timeout", 256, "abandon"), ("timeout", 64, "abandon"))
    for number, (stop, threshold, cut) in enumerate(arms):
        records = [late(request, number) for request in range(30)]
        write_run(records, stop=stop, threshold=threshold, cut=cut)
    for count in (2, 3):
        found = json.loads(printed("--json", paths=sorted(tmp_path.iterdir())[:count]))
        means = [each[f"{TTFT} difference"] for each in found[1:]]
        assert means == pytest.approx([1, 2][: count - 1])
        assert [each["prefetch.cut"] for each in found] == ["fit", "abandon", "abandon"][:count]


def test_baseline_metrics_over_all_pairs_are_those_of_the_summary(tmp_path, two_runs, late, pairs):
    random = np.random.default_rng(3)
    delays, lengths = random.exponential(size=99), random.integers(1, 9, size=99)
    records = [late(n, delays[n], output_len=int(lengths[n])) for n in range(99)]
    two_runs(records, [late(number, 50) for number in range(99)])
    found = pairs().differences(list(METRICS))
    summary = json.loads((tmp_path / "00" / "summary.json").read_text())
    without_peers = {"cache/peer_hit_tokens": 0}
    assert {key: value.baseline for key, value in found.items()} == pytest.approx(
        {key: (without_peers | summary)[key] for key in METRICS}
    )


def test_an_interval_is_that_of_a_paired_t_test_of_logarithms(windows, pairs):
    # all sessions of a window share their delay, so ten windows say as much as ten numbers
    delays = 5 + np.random.default_rng(1).normal(size=10)
    windows(np.repeat(delays[:, None], 6, axis=1))
    found = pairs().differences([TTFT])[TTFT]
    logs = np.log((found.baseline + delays) / found.baseline)
    wanted = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.relative.interval == pytest.approx(np.exp(wanted) - 1)
    assert found.relative.middle == pytest.approx(np.exp(logs.mean()) - 1)
    wanted = stats.ttest_1samp(delays, 0).confidence_interval(0.95)
    assert found.absolute.interval == pytest.approx(tuple(wanted))


def test_the_smallest_detectable_effect_is_found_in_80_percent_of_comparisons():
    random = np.random.default_rng(2)
    for num_blocks in (3, 8):
        base = np.exp(random.normal(size=(1_000, num_blocks)))
        noise = np.exp(random.normal(scale=0.05, size=base.shape))
        alike = [ratio(one, one * change) for one, change in zip(base, noise, strict=True)]
        assert np.mean([each.interval[0] > 0 or each.interval[1] < 0 for each in alike]) < 0.07
        # of the true spread: that of few blocks is an estimate itself
        factor = 1 + np.median([each.least for each in alike])
        better = [
            ratio(one, one * change * factor) for one, change in zip(base, noise, strict=True)
        ]
        assert np.mean([each.interval[0] > 0 for each in better]) == pytest.approx(0.8, abs=0.04)


def test_the_blocks_needed_to_find_a_five_percent_effect_follow_from_the_spread():
    logs = np.tile([-0.1, 0.1], 3)
    spread = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    seen = logs.std(ddof=1) / np.sqrt(stats.chi2.median(5) / 5)  # as often too large as too small
    wanted = (spread * seen / np.log(1.05)) ** 2
    assert ratio(np.ones(6), np.exp(logs)).needed == pytest.approx(wanted + 2, abs=1)
    alike = difference(np.ones(6), 1 + logs * 1e-9)
    assert alike.needed == 3
    assert (*alike.interval, alike.least) == pytest.approx((0, 0, 0), abs=1e-6)


def test_a_table_without_an_interval_gives_the_reason(windows, printed):
    windows(np.full((2, 3), 0.5))
    text = " ".join(printed("--metric", "request/ttft_s_p50").split())
    assert "No interval: 2 slice(s) or seed(s) (workload.slice, seed), at least 3 are n" in text


@pytest.mark.parametrize(("kind", "is_one_trace"), [("trace", True), ("chat", False)])
def test_runs_of_equal_seeds_are_paired(two_runs, late, pairs, printed, kind, is_one_trace):
    for seed in range(3):
        first, second = ([late(n, seed / 10 + place) for n in range(6)] for place in (0, 1))
        two_runs(first, second, seed=seed, kind=kind)
    found = pairs()
    assert (len(found), found.num_blocks, found.blocks) == (18, 3, "seed")
    assert found.is_one_trace is is_one_trace
    assert found.differences([TTFT])[TTFT].middle == pytest.approx(1)
    text = " ".join(printed("--metric", TTFT).split())
    assert ("intervals hold for this part only" in text) is is_one_trace
    assert "Smallest effects that 80% of such comparisons find: TTFT mean, s " in text


def test_requests_that_one_side_rejected_are_left_out_and_counted(
    two_runs, make_record, late, pairs, printed
):
    lengths = ("device_hit_len", "host_hit_len", "storage_hit_len", "computed_len", "output_len")
    nothing = dict.fromkeys([*lengths, *(f"{part}_ns" for part in TTFT_PARTS)], 0)
    nothing |= {"status": Status.rejected, "first_token_ns": None, "finish_ns": None}
    two_runs([late(0, 0), late(1, 0)], [make_record(0, **nothing), late(1, 1)])
    assert (len(pairs()), pairs().num_unpaired) == (1, 1)
    assert "1 requests (50.0%) finished on one side only" in printed()


def test_pairing_runs_that_served_different_requests_is_refused(two_runs, late, pairs):
    two_runs([late(0, 0)], [late(0, 0, session_id=7)])
    with pytest.raises(ValueError, match="served different requests"):
        pairs()


def test_a_paired_table_is_printed_as_text_markdown_csv_or_json(two_runs, make_record, printed):
    two_runs()
    told = ("--metric", TTFT)
    _, row = json.loads(printed(*told, "--json"))
    assert row["prefetch.stop"] == "timeout"
    assert row[f"{TTFT} difference"] == pytest.approx(0.5)
    first, other = csv.DictReader(printed(*told, "--csv").splitlines())
    assert first[f"{TTFT} difference"] == ""
    assert first[f"{TTFT} of the first row"] == other[f"{TTFT} of the first row"]
    assert float(other[f"{TTFT} difference"]) == pytest.approx(0.5)
    assert other["requests"] == "9"
    for form in ((), ("--markdown",)):
        (percent,) = re.findall(r"\+([\d.]+)%", printed(*told, *form))
        assert float(percent) == pytest.approx(100 * 0.5 / (make_record(0).ttft_ns / SECOND_NS))


@pytest.mark.parametrize("busy", STOPS)
def test_latencies_of_an_overloaded_run_get_no_paired_difference(write_run, late, printed, busy):
    for stop, window in product(STOPS, range(8)):
        records = [late(number, stop == busy) for number in range(6)]
        load = {"load/rho_gpu": 0.95 if stop == busy else 0.5}
        write_run(records, stop=stop, window=window, counted=load)
    keys = (TTFT, "cache/token_hit_rate")
    told = [f"--metric={key}" for key in keys]
    lines = printed(*told).splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith(STOPS)}
    assert rows["timeout"].count("–") == 1  # its TTFT
    # a word of each row names its objections
    letters = {stop: re.search(r" ([abcd]+) ", rows[stop])[1] for stop in STOPS}
    assert [stop for stop in STOPS if "b" in letters[stop]] == [busy]
    first, row = json.loads(printed(*told, "--json"))
    ttft, hits = ([row[f"{key} {part}"] for part in ("difference", "low", "high")] for key in keys)
    assert first[f"{TTFT} of the first row"] > 0  # the latency itself stays
    assert ttft == [None] * 3
    assert hits == [0, 0, 0]


@pytest.mark.parametrize("key", ["transfer/storage_write_bytes", "jobs/completion_s_mean"])
def test_a_measure_without_values_per_request_is_paired_by_window(write_run, late, printed, key):
    written = {"best_effort": range(10, 18), "timeout": range(20, 36, 2)}
    for stop, counts in written.items():
        for window, count in enumerate(counts):
            records = [late(number, 0, session_id=number) for number in range(3)]
            write_run(records, stop=stop, window=window, counted={key: count})
    _, row = json.loads(printed("--metric", key, "--json"))
    assert (row[f"{key} of the first row"], row[f"{key} difference"]) == (13.5, 13.5)
    half = 2.365 * np.std(range(10, 18), ddof=1) / np.sqrt(8)
    interval = [row[f"{key} low"], row[f"{key} high"]]
    assert interval == pytest.approx([13.5 - half, 13.5 + half], rel=0.05)
    assert row["windows"] == 8


@pytest.mark.parametrize(
    ("options", "names", "complaint"),
    [
        (["--metric=load/rho"], ["00", "01"], "has no metric load/rho"),
        ([], ["00"], "at least two configurations"),
    ],
)
def test_a_paired_comparison_without_the_metric_or_a_second_run_is_refused(
    tmp_path, two_runs, printed, capsys, options, names, complaint
):
    two_runs()
    with pytest.raises(SystemExit, match="2"):
        printed(*options, paths=[tmp_path / name for name in names])
    assert complaint in capsys.readouterr().err
