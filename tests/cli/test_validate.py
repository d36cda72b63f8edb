"""`hicache validate` and `hicache calibrate`: a run compared with the log of a server."""

import json
import math
from pathlib import Path

import pytest

from hicache import run
from hicache.cli import calibrate, validate
from hicache.results import calibration
from hicache.results.calibration import fitted
from hicache.results.requests_file import read_requests
from hicache.results.server_log import compare_measured, read_measured
from hicache.runs.schema import config_of

TOLD = ("model=llama3_8b", "hardware=h100", "parallel.tp=1", "storage=none")
LOAD = ("workload=multi_turn", "workload.num_sessions=3", "workload.rounds=2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    told = (*TOLD, *LOAD, "workload.request_rate=0.2", "workload.in_flight=1")
    return run(*told, out_dir=tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture
def log_of_server(run_dir, tmp_path):
    """Return a function that writes a server's log and returns its path and a table of errors."""

    def write(*, slower=1.0, later_s=0.0, has_hits=True):
        lines = []
        for row in read_requests(run_dir).to_dict("records"):
            ttft_s, latency_s = (
                (row[key] - row["arrival_ns"]) / 1e9 * slower + later_s
                for key in ("first_token_ns", "finish_ns")
            )
            line = {"arrival": row["arrival_ns"] / 1e9, "ttft": ttft_s, "latency": latency_s}
            line |= {"prompt": row["prompt_len"], "output": row["output_len"]}
            tiers = ("device", "host", "storage") if has_hits else ()
            line |= {f"{tier}_hit": row[f"{tier}_hit_len"] for tier in tiers}
            lines.append(json.dumps(line))
        (tmp_path / "log").write_text("\n".join(reversed(lines)))
        table = compare_measured(read_requests(run_dir), read_measured(tmp_path / "log"))
        return str(tmp_path / "log"), table.set_index("measure")

    return write


def test_errors_are_relative_to_the_measured_values(run_dir, log_of_server, capsys):
    _, table = log_of_server()
    assert table["error"].abs().max() < 1e-4
    file, table = log_of_server(slower=2.0)
    assert table.loc["hits", "error"] == 0
    assert table.loc["hits", "measured"] > 20
    assert table.loc["ttft_s", "error"] == pytest.approx(-50)
    assert table.loc["ttft of each request", "error"] == pytest.approx(50)
    validate.main([str(run_dir), file])
    assert "ttft of each request" in capsys.readouterr().out


def test_calibrate_writes_a_machine_file_that_a_run_can_use(log_of_server, capsys, tmp_path):
    file, _ = log_of_server(later_s=0.125)
    machine = tmp_path / "mine.yaml"
    own = "hardware.pcie_bandwidth.value=40e9"
    calibrate.main([file, *TOLD, own, "--fit", "scheduler.server_s", "--out", str(machine)])
    assert capsys.readouterr().out.startswith("scheduler.server_s=0.125 ")
    config = config_of(f"hardware={machine}", "model=llama3_8b")
    assert config.scheduler.server_s == pytest.approx(0.125, rel=0.01)
    assert (config.hardware.name, config.hardware.pcie_bandwidth.value) == ("h100", 40e9)
    assert config_of(f"hardware={machine}", "scheduler.server_s=1").scheduler.server_s == 1


def test_calibrate_names_the_constants_that_a_log_identifies(log_of_server, capsys, monkeypatch):
    file, _ = log_of_server(later_s=0.125)
    monkeypatch.setattr(calibration, "KNOWN_SHARE", 0)  # no factor is known well enough
    with pytest.raises(SystemExit):
        calibrate.main([file, *TOLD, "--fit", "scheduler.server_s,hardware.prefill_factor"])
    told = capsys.readouterr().err
    assert "does not identify hardware.prefill_factor: " in told
    assert "(--fit scheduler.server_s fits the rest)" in told


def test_calibrate_finds_that_a_server_takes_no_time_before_its_engine(log_of_server):
    file, _ = log_of_server()
    found = fitted(config_of(*TOLD), read_measured(Path(file)), ["scheduler.server_s"])
    assert found.values["scheduler.server_s"] < 1e-5


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("seed=0", "scheduler.begin_s needs requests that come while"),
        ("model.max_len=64", "exceeds the 64 of llama3_8b"),
    ],
)
def test_calibrate_refuses_a_log_that_does_not_fit(setting, told, log_of_server, capsys, tmp_path):
    file, _ = log_of_server()
    with pytest.raises(SystemExit):
        calibrate.main([file, *TOLD, setting, "--out", str(tmp_path / "mine.yaml")])
    assert told in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{base: h100, cache: {policy: 'mine:Class'}}", "must not set cache.policy"),
        ("{base: mine.yaml}", "base must name a profile"),
        ("{hardware: {name: x}}", "base must name a profile"),
        ("{base: h100, hardware: {name: '${oc.env:HOME}'}}", "hardware.name must be a value"),
        (None, "does not exist"),
    ],
)
def test_a_machine_file_with_other_settings_or_an_unknown_base_is_refused(text, told, tmp_path):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=told):
        config_of(f"hardware={path}")


def test_requests_without_hit_fields_are_neither_hits_nor_misses(log_of_server, capsys):
    file, table = log_of_server(has_hits=False)
    assert table.loc[["hits", "hit_count"], "measured"].isna().all()
    with pytest.raises(SystemExit):
        calibrate.main([file, *TOLD])
    assert "the log has 0 requests" in capsys.readouterr().err


LINE = {"arrival": 0, "ttft": 1, "latency": 2, "prompt": 50, "output": 1}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"arrival": 1}, "line 1: the row: ttft is missing"),
        (None, "no requests"),
        ("nonsense", "line 1: "),
        ({**LINE, "device_hit": 51}, "51 tokens hit of a prompt of 50"),
        ({**LINE, "ttft": 3}, "ttft must be above 0 and at most latency=2, got 3"),
        ({**LINE, "ttft": 0}, "ttft must be above 0 and at most latency=2, got 0"),
        ({**LINE, "arrival": -1}, "arrival must be a number of at least 0"),
        ({**LINE, "arrival": math.inf}, "not JSON"),
        ({**LINE, "latency": 1e300}, "latency must be a number of at most 315360000"),
        ({**LINE, "prompt": 0}, "prompt must be an integer of at least 1"),
        ({**LINE, "output": 1.5}, "output must be an integer, got a number"),
        ({**LINE, "output": True}, "output must be an integer, got bool"),
        ({**LINE, "host_hit": -3}, "host_hit must be an integer of at least 0"),
        ({**LINE, "prompt": 10**30}, "prompt must be an integer of at most 100000000"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_with_its_line(line, told, tmp_path):
    (tmp_path / "log").write_text("" if line is None else json.dumps(line))
    with pytest.raises(ValueError, match=told):
        read_measured(tmp_path / "log")


def test_requests_of_a_log_are_numbered_as_they_arrive(tmp_path):
    lines = [json.dumps({**LINE, "arrival": arrival}) for arrival in (5, 2, 9)]
    (tmp_path / "log").write_text("\n".join(lines))
    found = read_measured(tmp_path / "log")
    assert (list(found.index), list(found.arrival_ns / 1e9)) == ([0, 1, 2], [2, 5, 9])


def test_a_run_without_engine_explain_has_no_columns_of_miss_reasons(run_dir):
    assert not [name for name in read_requests(run_dir) if "computed_for" in name]


def test_a_machine_file_may_name_a_machine_in_any_script(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{base: h100, hardware: {name: café}}", encoding="utf-8")
    assert config_of(f"hardware={path}").hardware.name == "café"
