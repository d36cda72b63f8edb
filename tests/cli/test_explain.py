"""`hicache explain`: a run that is repeated, its requests in words, and a trace for Perfetto."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hicache import experiment
from hicache.cache.kinds import FULL
from hicache.cli.explain.command import lines, main
from hicache.cli.explain.rerun import rerun
from hicache.cli.explain.segments import Steps, segments_of
from hicache.cli.explain.story import _headline, _seconds, _size
from hicache.cli.explain.trace import events_of, write_trace
from hicache.observe.timeline import KINDS
from hicache.results.metrics import HANDOVER_PARTS, TTFT_PARTS, Status, summarize
from hicache.results.tracking import write_json
from hicache.runs.job import as_yaml, begin
from hicache.runs.schema import stored_config
from tests.test_experiment import config_of

TIGHT = ("model=gemma3_27b", "cache.device_gib=8", "cache.host_gib=4", "storage.read_gbps=0.5")


def check_trace(trace):
    """Check that spans of a track are nested or apart, tracks are named, and every span ends."""
    spans, begun = {}, {}
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
        around = []
        for span in sorted(track, key=lambda each: (each[0], -each[1])):
            while around and around[-1][1] <= span[0]:
                around.pop()
            assert not around or span[1] <= around[-1][1]
            around.append(span)


def key_of(event):
    return event["cat"], event["id"], event["pid"]


def stored(directory, *overrides):
    """Run the experiment, store what is needed to repeat it, and return `directory`."""
    config = config_of(*TIGHT, *overrides)
    result = experiment.run(config)
    begin(config, directory)
    write_json(directory / "summary.json", summarize(result.records, result.measures))
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("run"), "workload.limit=60", "parallel.replicas=2")


@pytest.fixture(scope="module")
def again(run_dir):
    return rerun(run_dir)


@pytest.fixture(scope="module")
def trace(again, tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(file, again)
    return json.loads(file.read_text())


def test_a_repeated_run_gives_equal_results_from_an_equal_config(run_dir, again):
    assert again.differences == ()
    assert len(again.records) == 60
    file = run_dir / "config.yaml"
    assert as_yaml(stored_config(file)) == file.read_text()


def test_a_run_of_a_relative_trace_path_is_explained_from_another_directory(tmp_path, monkeypatch):
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


def test_a_run_stored_by_a_release_with_other_settings_is_refused(run_dir, tmp_path):
    old = (run_dir / "config.yaml").read_text().replace("  policy: lru\n", "  eviction: lru\n")
    (tmp_path / "config.yaml").write_text(old)
    told = r"made by another release of hicache, .* 'eviction' not in .*: explain needs that"
    with pytest.raises(ValueError, match=told):
        stored_config(tmp_path / "config.yaml")


def test_the_segments_of_a_wait_are_contiguous_and_add_up_to_its_causes(again):
    steps = {engine: Steps(again.timeline, engine) for engine in again.timeline.turns}
    for record in again.records.values():
        if record.status is not Status.finished:
            continue
        segments = segments_of(record, again.timeline, steps)
        at_ns, queued = record.arrival_ns, Counter()
        for segment in segments:
            assert segment.start_ns == at_ns
            at_ns = segment.end_ns
            if segment.part == "queue":
                queued[segment.cause] += segment.length_ns
        assert at_ns == record.first_token_ns
        assert queued == record.queue_for_ns


def test_the_spans_of_a_trace_are_consistent_and_add_up_to_the_summary(trace, again):
    check_trace(trace)
    ended = {each.kind for each in again.timeline.transfers if each.end_ns is not None}
    assert ended == {*KINDS.values(), "storage query", "storage read"}
    events = trace["traceEvents"]
    tracks = [each for each in events if each["name"] == "thread_name"]
    assert len(tracks) == len(again.timeline.turns) + len(again.timeline.lives) > 2
    requests = [each for each in events if each.get("cat") == "request"]
    assert all(each["tid"] == each["args"]["id"] + 1 > 0 for each in requests)
    total_ns = Counter()
    for each in events:
        if each["ph"] == "X":
            total_ns[each["cat"]] += round(each["dur"] * 1000)
    count = again.summary["request/finished_count"]
    for part in TTFT_PARTS:
        mean_s = again.summary[f"request/{part}_s_mean"]
        assert total_ns[part] / count / 1e9 == pytest.approx(mean_s)
    busy_s = total_ns["forward"] / 1e9 * again.config.tp
    assert busy_s == pytest.approx(again.summary["gpu/busy_s"])


def separate(directory, *overrides):
    words = ("parallel.prefill=1", "parallel.decode=2", "model=llama3_8b", "cache.device_gib=40")
    run_dir = stored(directory, *words, "workload.limit=30", *overrides)
    return rerun(run_dir)


@pytest.fixture(scope="module")
def separated(tmp_path_factory):
    return separate(tmp_path_factory.mktemp("separate"))


def test_a_request_is_explained_on_both_its_prefill_and_its_decode_engine(separated):
    again = separated
    steps = {engine: Steps(again.timeline, engine) for engine in again.timeline.turns}
    for record in again.records.values():
        parts, at_ns = Counter(), record.arrival_ns
        for segment in segments_of(record, again.timeline, steps):
            assert segment.start_ns == at_ns
            at_ns = segment.end_ns
            parts[segment.part] += segment.length_ns
            assert (segment.engine == 0) or segment.part not in ("prefill", "load_back")
        assert at_ns == record.first_token_ns
        whole = {part: getattr(record, f"{part}_ns") for part in (*TTFT_PARTS, *HANDOVER_PARTS)}
        assert parts == {part: ns for part, ns in whole.items() if ns}
    told = lines(again, [7], 0)
    engine = again.records[7].engine
    assert told[1].endswith(f"decode engine {engine}")
    assert any(f"decode engine {engine} admitted it, promised" in line for line in told)
    assert any("prefill engine 0 has computed its prompt" in line for line in told)
    assert any("its KV has arrived" in line for line in told)


def test_a_lost_transfer_of_kv_is_explained_as_a_failed_attempt(tmp_path):
    again = separate(tmp_path, "parallel.faults.lost_rate=0.2")
    steps = {engine: Steps(again.timeline, engine) for engine in again.timeline.turns}
    told = 0
    for record in again.records.values():
        if record.status is Status.rejected:  # after three attempts
            told += 3
            continue
        segments = segments_of(record, again.timeline, steps)
        assert sum(each.length_ns for each in segments) == segments[-1].end_ns - record.arrival_ns
        told += sum("ended this attempt: KV" in line for line in lines(again, [record.id], 0))
    assert told == again.summary["decode/failed_handovers_count"] > 0


def test_a_trace_shows_a_transfer_on_the_tracks_of_both_engines(separated, tmp_path):
    again = separated
    write_trace(tmp_path / "trace.json", again)
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_trace(trace)
    names = {
        each["pid"]: each["args"]["name"]
        for each in trace["traceEvents"]
        if each["name"] == "process_name"
    }
    assert list(names.values())[1:] == ["prefill engine 0", "decode engine 1", "decode engine 2"]
    sent, received = Counter(), Counter()
    for each in trace["traceEvents"]:
        if each["ph"] == "b" and each["name"] == "handover":
            on = sent if names[each["pid"]].startswith("prefill") else received
            on[each["id"]] += each["args"]["bytes"]
    assert sent == received
    assert sum(sent.values()) == again.summary["transfer/link_bytes"]


@pytest.mark.parametrize("damage", [{"ts": None}, {"ph": "?"}, {"tid": -5}, {"dur": 1e18}])
def test_check_trace_fails_on_a_damaged_trace(trace, damage):
    copy = json.loads(json.dumps(trace))
    next(each for each in copy["traceEvents"] if each.get("cat") == "prefill").update(damage)
    with pytest.raises((AssertionError, TypeError)):
        check_trace(copy)


def test_the_slowest_requests_or_all_requests_are_explained(again):
    told = lines(again, (), 3)
    answered = [each for each in again.records.values() if each.ttft_ns is not None]
    answered.sort(key=lambda each: -each.ttft_ns)
    titles = [line.partition(",")[0] for line in told if line.startswith("Request ")]
    assert titles == [f"Request {each.id}" for each in answered[:3]]
    assert sum("first token after" in line for line in told) == 3
    assert sum("Why it computed" in line for line in told) >= 3
    told = lines(again, list(again.records), 0)
    assert sum(line.startswith("Request ") for line in told) == 60
    with pytest.raises(ValueError, match="no request 9999: request ids go from 0 to 59"):
        lines(again, [9999], 0)


def test_the_evictions_that_caused_a_miss_add_up_to_its_tokens(again):
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


def test_an_eviction_is_dated_from_the_arrival_of_the_request_that_misses_its_pages(again):
    dated = Counter()
    for id, case in again.timeline.cases.items():
        told = "\n".join(lines(again, [id], 0))
        for span in (span for part in case.spans for span in part if len(span.evictions) == 1):
            late_ns = span.evictions[0].when_ns - again.records[id].arrival_ns
            when = "after" if late_ns >= 0 else "before"
            assert f"evicted {_seconds(abs(late_ns))} {when} its arrival" in told
            dated[when] += 1
    assert dated["before"]


def test_the_command_explains_sessions_by_their_ids_and_writes_a_trace(
    tmp_path, capsys, monkeypatch
):
    turns = [
        {"timestamp": 1000 * n, "input_length": 600 + n, "output_length": 5, "session_id": name}
        for n, name in enumerate(("chat-7", "chat-8", "chat-7"))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    run = str(stored(tmp_path / "run", f"workload.path={path}", "workload=trace"))
    written = tmp_path / "spans.json"
    main([run, "--session", "chat-7", "--perfetto", str(written)])
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line.startswith("Request")] == [
        "Request 0, session chat-7, engine 0",
        "Request 2, session chat-7, engine 0",
    ]
    assert "spans.json" in told[-1]
    check_trace(json.loads(written.read_text()))
    monkeypatch.setenv("HICACHE_TRACEBACK", "0")
    for arguments, refusal in (
        ([run, "--session", "chat-9"], "no session chat-9; it has chat-7, chat-8"),
        ([str(tmp_path)], "is not a run directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert refusal in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"device_hit_len": 30, "host_hit_len": 0, "storage_hit_len": 0, "computed_len": 70},
            "prompt of 100 tokens: 30 on the device, 70 computed",
        ),
        (
            {"device_hit_len": 0, "host_hit_len": 60, "storage_hit_len": 30, "computed_len": 10,
             "draft_cold_len": 5},
            "prompt of 100 tokens: 60 on the host, 30 read from storage, 10 computed, "
            "5 of the hits without KV of the draft",
        ),
        (
            {"device_hit_len": 0, "host_hit_len": 0, "storage_hit_len": 0, "computed_len": 0},
            "prompt of 100 tokens: never admitted",
        ),
    ],
)  # fmt: skip
def test_the_explanation_counts_prompt_tokens_by_the_tier_they_were_in(make_record, changes, told):
    assert _size(make_record(0, prompt_len=100, **changes)) == told


def test_the_first_line_names_the_longest_part_of_the_time_to_the_first_token(make_record):
    longest = {"own": 10, "shared": 20, "fence": 30, "stalled": 45}
    record = make_record(
        0, arrival_ns=0, first_token_ns=250, storage_wait_ns=70, load_back_ns=0,
        queue_for_ns={}, prefill_for_ns=longest,
    )  # fmt: skip
    assert _headline(record) == "first token after 0 µs, 30% of it waiting between its steps"
    record = make_record(1, status=Status.aborted, first_token_ns=None, reason="its client left")
    assert _headline(record) == "aborted before its first token: its client left"


def test_a_read_from_a_peer_names_the_engine(tmp_path):
    words = ("storage=peers", "parallel.replicas=2", "parallel.router=round_robin")
    more = ("prefetch.stop=wait_complete", "cache.host_gib=16", "workload.limit=40")
    again = rerun(stored(tmp_path, *words, *more))
    assert again.differences == ()
    record = max(again.records.values(), key=lambda each: each.peer_hit_len)
    told = "\n".join(lines(again, [record.id], 0))
    assert f"engine {1 - record.engine} answered: " in told
    assert f"{record.peer_hit_len:,} read from the host of another engine" in told
    read = [each for each in again.timeline.transfers if each.about.get("request") == record.id]
    assert read[-1].about["source"] == 1 - record.engine
