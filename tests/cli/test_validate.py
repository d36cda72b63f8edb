"""A run beside the log of a server."""

import json
import math
from pathlib import Path

import pytest

from hicache import run
from hicache.cli import calibrate, validate
from hicache.results.requests_file import read_requests
from hicache.results.server_log import compare_measured, read_measured

TOLD = ("model=llama3_8b", "hardware=h100", "parallel.tp=1", "storage=none")
LOAD = ("workload=multi_turn", "workload.num_sessions=3", "workload.rounds=2")


def log_of(run_dir: Path, file: Path, *, slower: float = 1.0, later_s: float = 0.0) -> Path:
    """The log of a server that takes so many times and seconds longer than the run."""
    lines = []
    for row in read_requests(run_dir).to_dict("records"):
        ttft_s, latency_s = (
            (row[key] - row["arrival_ns"]) / 1e9 * slower + later_s
            for key in ("first_token_ns", "finish_ns")
        )
        line = {"arrival": row["arrival_ns"] / 1e9, "ttft": ttft_s, "latency": latency_s}
        line |= {"prompt": row["prompt_len"], "output": row["output_len"]}
        line |= {f"{tier}_hit": row[f"{tier}_hit_len"] for tier in ("device", "host", "storage")}
        lines.append(json.dumps(line))
    file.write_text("\n".join(reversed(lines)))
    return file


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    told = (*TOLD, *LOAD, "workload.request_rate=0.2", "workload.parallel=1")
    return run(*told, out_dir=tmp_path_factory.mktemp("runs") / "run").path


def test_a_log_of_the_run_itself_differs_in_nothing(run_dir: Path, tmp_path: Path) -> None:
    log = read_measured(log_of(run_dir, tmp_path / "log"))
    assert compare_measured(read_requests(run_dir), log)["error"].abs().max() < 1e-4


def test_errors_are_relative_to_what_was_measured(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = log_of(run_dir, tmp_path / "log", slower=2.0)
    table = compare_measured(read_requests(run_dir), read_measured(file)).set_index("measure")
    assert table.loc["hits", "error"] == 0
    assert table.loc["hits", "measured"] > 20
    assert table.loc["ttft_s", "error"] == pytest.approx(-50)
    assert table.loc["ttft of each request", "error"] == pytest.approx(50)
    validate.main([str(run_dir), str(file)])
    assert "ttft of each request" in capsys.readouterr().out


def test_the_constant_of_a_server_is_found(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate.main([str(log_of(run_dir, tmp_path / "log", later_s=0.125)), *TOLD])
    assert capsys.readouterr().out.startswith("scheduler.server_s=0.125 ")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            '{"arrival": 1}',
            "line 1: the row: ttft is missing",
        ),
        ("nonsense", "line 1: "),
        ("", "no requests"),
    ],
)
def test_a_log_that_is_none_is_refused_with_its_line(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line)
    with pytest.raises(ValueError, match=told):
        read_measured(tmp_path / "log")


def test_requests_without_hit_fields_count_neither_as_hits_nor_as_misses(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = log_of(run_dir, tmp_path / "log")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    unknown = [{key: line[key] for key in line if "hit" not in key} for line in lines]
    file.write_text("\n".join(map(json.dumps, unknown)))
    table = compare_measured(read_requests(run_dir), read_measured(file)).set_index("measure")
    assert table.loc[["hits", "hit_count"], "measured"].isna().all()
    with pytest.raises(SystemExit):
        calibrate.main([str(file), *TOLD])
    assert "known to have hit nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device_hit": 51}, "51 tokens hit of a prompt of 50"),
        ({"ttft": 3}, "ttft must be above 0 and at most latency=2, got 3"),
        ({"ttft": 0}, "ttft must be above 0 and at most latency=2, got 0"),
        ({"arrival": -1}, "arrival must be a number of at least 0"),
        ({"arrival": math.inf}, "not JSON"),
        ({"latency": math.nan}, "not JSON"),
        ({"latency": 1e300}, "latency must be a number of at most 315360000"),
        ({"prompt": 0}, "prompt must be an integer of at least 1"),
        ({"prompt": -50}, "prompt must be an integer of at least 1"),
        ({"output": 1.5}, "output must be an integer, got a number"),
        ({"output": True}, "output must be an integer, got bool"),
        ({"host_hit": -3}, "host_hit must be an integer of at least 0"),
        ({"prompt": 10**30}, "prompt must be an integer of at most 100000000"),
    ],
)
def test_a_line_that_contradicts_itself_is_refused(
    changes: dict[str, float], told: str, tmp_path: Path
) -> None:
    line = {"arrival": 0, "ttft": 1, "latency": 2, "prompt": 50, "output": 1, **changes}
    (tmp_path / "log").write_text(json.dumps(line))
    with pytest.raises(ValueError, match=told):
        read_measured(tmp_path / "log")


def test_a_run_that_was_not_explained_has_no_columns_of_reasons(run_dir: Path) -> None:
    assert not [name for name in read_requests(run_dir) if "computed_for" in name]
