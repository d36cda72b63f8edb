"""A run explained: lives in words, and a trace that adds up."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache import experiment
from hicache.cache.kinds import FULL
from hicache.cli.explain.command import lines, main
from hicache.cli.explain.rerun import Rerun, rerun
from hicache.cli.explain.segments import Steps, segments_of
from hicache.cli.explain.trace import events_of, write_trace
from hicache.results.metrics import TTFT_PARTS, Status, summarize
from hicache.results.tracking import write_json
from hicache.runs.job import as_yaml, begin
from hicache.runs.schema import stored_config
from tests.test_experiment import config_of

TIGHT = ("model=gemma3_27b", "cache.device_gib=8", "cache.host_gib=4", "storage.read_gbps=0.5")


def check_trace(trace: dict[str, Any]) -> None:
    """Spans of a track lie inside or beside each other, tracks are named, and what begins ends."""
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    begun: dict[tuple[str, int, int], float] = {}
    named = {(each["pid"], each["tid"]) for each in trace["traceEvents"] if each["ph"] == "M"}
    for event in trace["traceEvents"]:
        match event["ph"]:
            case "X":
                first, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
                spans.setdefault((event["pid"], event["tid"]), []).append((first, first + length))
            case "b":
                assert begun.setdefault(key_of(event), event["ts"]) == event["ts"]
            case "e":
                assert begun.pop(key_of(event)) <= event["ts"]
            case phase:
                assert phase == "M"
    assert not begun
    assert set(spans) <= named
    for track in spans.values():
        around: list[tuple[int, int]] = []
        for span in sorted(track, key=lambda each: (each[0], -each[1])):
            while around and around[-1][1] <= span[0]:
                around.pop()
            assert not around or span[1] <= around[-1][1]
            around.append(span)


def key_of(event: dict[str, Any]) -> tuple[str, int, int]:
    return event["cat"], event["id"], event["pid"]


def stored(directory: Path, *overrides: str) -> Path:
    """A run, as far as it is needed to make it again."""
    config = config_of(*TIGHT, *overrides)
    result = experiment.run(config)
    begin(config, directory)
    write_json(directory / "summary.json", summarize(result.records, result.measures))
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("run"), "workload.limit=150", "parallel.replicas=2")


@pytest.fixture(scope="module")
def again(run_dir: Path) -> Rerun:
    return rerun(run_dir)


@pytest.fixture(scope="module")
def trace(again: Rerun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(file, again)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_run_comes_out_the_same_when_it_is_made_again(again: Rerun) -> None:
    assert again.differences == ()
    assert len(again.records) == 150


def test_a_run_of_a_relative_path_is_explained_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(record))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    mine = ("workload=trace", "workload.path=mine.jsonl", "workload.limit=null")
    directory = stored(tmp_path / "run", *mine)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = rerun(Path("..", directory.name))
    assert len(again.records) == 1
    spans = [each["name"] for each in events_of(again) if each["ph"] == "X"]
    assert "prefill" in spans
    assert "answer" not in spans  # one token, which the prompt's step has computed


def test_a_stored_configuration_is_read_back_as_it_was(run_dir: Path) -> None:
    file = run_dir / "config.yaml"
    assert as_yaml(stored_config(file)) == file.read_text()


def test_a_run_of_a_release_with_other_settings_is_not_explained(
    run_dir: Path, tmp_path: Path
) -> None:
    old = (run_dir / "config.yaml").read_text().replace("  policy: lru\n", "  eviction: lru\n")
    (tmp_path / "config.yaml").write_text(old)
    told = r"made by another release of hicache, .* 'eviction' not in .*: explain needs that"
    with pytest.raises(ValueError, match=told):
        stored_config(tmp_path / "config.yaml")


def test_the_pieces_of_a_wait_are_those_that_the_run_has_measured(again: Rerun) -> None:
    steps = {engine: Steps(again.timeline, engine) for engine in again.timeline.turns}
    for record in again.records.values():
        if record.status is not Status.finished:
            continue
        life, turns = again.timeline.lives[record.id], again.timeline.turns[record.engine]
        segments = segments_of(record, life, turns, steps[record.engine])
        at_ns = record.arrival_ns
        for segment in segments:
            assert segment.start_ns == at_ns
            at_ns = segment.end_ns
        assert at_ns == record.first_token_ns
        queued: dict[str, int] = {}
        for segment in segments:
            if segment.part == "queue":
                queued[segment.cause] = queued.get(segment.cause, 0) + segment.length_ns
        assert queued == record.queue_for_ns


def test_a_trace_is_what_its_format_wants(trace: dict[str, Any], again: Rerun) -> None:
    check_trace(trace)
    tracks = [each for each in trace["traceEvents"] if each["name"] == "thread_name"]
    assert len(tracks) == len(again.timeline.turns) + len(again.timeline.lives) > 2
    requests = [each for each in trace["traceEvents"] if each.get("cat") == "request"]
    assert all(each["tid"] == each["args"]["id"] + 1 > 0 for each in requests)


def test_the_spans_of_a_trace_add_up_to_the_summary(trace: dict[str, Any], again: Rerun) -> None:
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    count = again.summary["request/finished_count"]
    for part in TTFT_PARTS:
        total_ns = sum(round(span["dur"] * 1000) for span in spans if span["cat"] == part)
        assert total_ns / count / 1e9 == pytest.approx(again.summary[f"request/{part}_s_mean"])
    forward_ns = sum(round(span["dur"] * 1000) for span in spans if span["cat"] == "forward")
    assert forward_ns / 1e9 * again.config.tp == pytest.approx(again.summary["gpu/busy_s"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.pop("ts"),
        lambda event: event.update(dur="long"),
        lambda event: event.update(ph="?"),
        lambda event: event.update(tid=-5),
        lambda event: event.update(dur=event["dur"] + 1e9),
    ],
)
def test_a_spoilt_trace_is_seen(trace: dict[str, Any], spoil: Any) -> None:
    spoilt = json.loads(json.dumps(trace))
    event = next(
        each for each in spoilt["traceEvents"] if each["ph"] == "X" and each["cat"] == "prefill"
    )
    spoil(event)
    with pytest.raises((AssertionError, KeyError, TypeError)):
        check_trace(spoilt)


def test_the_slowest_are_told_of(again: Rerun) -> None:
    told = lines(again, (), 3)
    answered = [each for each in again.records.values() if each.ttft_ns is not None]
    answered.sort(key=lambda each: -(each.ttft_ns or 0))
    titles = [line.partition(",")[0] for line in told if line.startswith("Request ")]
    assert titles == [f"Request {each.id}" for each in answered[:3]]
    assert sum("first token after" in line for line in told) == 3
    assert sum("Why it computed" in line for line in told) >= 3


def test_every_request_can_be_told_of(again: Rerun) -> None:
    told = lines(again, list(again.records), 0)
    assert sum(line.startswith("Request ") for line in told) == 150


def test_evictions_are_named_of_pages_that_were_there(again: Rerun) -> None:
    cases = again.timeline.cases.values()
    spans = [span for case in cases for part in case.spans for span in part]
    evictions = [each for span in spans for each in span.evictions]
    assert {each.request_id for each in evictions} <= set(again.records)
    assert min(each.when_ns for each in evictions) > 0
    page = again.config.cache.page_size
    evicted = [span for span in spans if span.kind == FULL and span.reason.startswith("evicted_")]
    assert evicted
    for span in evicted:
        assert sum(each.num_pages for each in span.evictions) * page == span.num_tokens


def test_a_request_that_is_not_there_is_named(again: Rerun) -> None:
    with pytest.raises(ValueError, match="no request 9999: request ids go from 0 to 149"):
        lines(again, [9999], 0)


def test_the_command_tells_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, "workload.limit=20")
    main([str(run), "--request", "3", "--perfetto", str(tmp_path / "trace.json")])
    told = capsys.readouterr().out
    assert told.startswith("\nRequest 3, ")
    assert "trace.json" in told.splitlines()[-1]
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_the_requests_of_a_session_are_explained_by_its_id_in_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [
        {"timestamp": 1000 * n, "input_length": 600 + n, "output_length": 5, "session_id": name}
        for n, name in enumerate(("chat-7", "chat-8", "chat-7"))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    directory = stored(tmp_path / "run", f"workload.path={path}", "workload=trace")
    main([str(directory), "--session", "chat-7"])
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("Request")] == [
        "Request 0, session chat-7, engine 0",
        "Request 2, session chat-7, engine 0",
    ]
    monkeypatch.setenv("HICACHE_TRACEBACK", "0")
    with pytest.raises(SystemExit):
        main([str(directory), "--session", "chat-9"])
    assert "no session chat-9; it has chat-7, chat-8" in capsys.readouterr().err
