"""Each form that docs/traces.md names: a file as its producer writes it, and its totals."""

import csv
import gzip
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hicache.cli.main import main
from hicache.experiment import run
from hicache.results.requests_file import read_requests, write_requests
from hicache.runs.schema import config_of
from hicache.workload.trace import Trace, TraceError
from hicache.workload.workload import FORMS, Workload, form_of
from tests.workload.traces import ids, load, shared_len, whole

FIXTURES = Path(__file__).parent / "fixtures"


class Totals(NamedTuple):
    requests: int
    prompt_tokens: int
    answer_tokens: int
    span_s: float
    sessions: int


def totals(found: Workload, *, is_drawn: bool = False) -> Totals:
    """Return a workload's Totals; with drawn session starts, `span_s` is the sum over sessions."""
    requests = found.requests
    times: dict[int, list[int]] = {}
    for each in requests:
        times.setdefault(each.session_id if is_drawn else 0, []).append(each.arrival_ns)
    return Totals(
        len(requests),
        sum(each.prompt_len for each in requests),
        sum(each.output_len for each in requests),
        round(sum(max(each) - min(each) for each in times.values()) / 1e9, 6),
        len({each.session_id for each in requests}),
    )


def records(name: str) -> list[Any]:
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


def rows(name: str) -> list[dict[str, str]]:
    with (FIXTURES / name).open() as file:
        return list(csv.DictReader(file))


def summed(
    found: Iterable[Any],
    prompt: str,
    answer: str,
    time: str,
    sessions: int,
    *,
    units_per_s: float = 1,
) -> Totals:
    """Return the Totals of the named columns as the file has them, without hicache's readers."""
    found = list(found)
    times = [float(each[time]) for each in found]
    return Totals(
        len(found),
        sum(int(each[prompt]) for each in found),
        sum(max(int(each[answer]), 1) for each in found),
        round((max(times) - min(times)) / units_per_s, 6),
        sessions,
    )


def summed_rows(name: str, sessions: int, *, units_per_s: float = 1) -> Totals:
    """Return the Totals of a file with the columns of Mooncake's traces."""
    columns = ("input_length", "output_length", "timestamp")
    return summed(records(name), *columns, sessions, units_per_s=units_per_s)


def azure_totals() -> Totals:
    found = rows("azure.csv")
    for each in found:
        hours, minutes, seconds = each["TIMESTAMP"].split()[1].split(":")
        each["time"] = str(int(hours) * 3600 + int(minutes) * 60 + float(seconds[:9]))
    return summed(found, "ContextTokens", "GeneratedTokens", "time", 3)


def dynamo_totals() -> Totals:
    events = [each["event"] for each in records("dynamo.jsonl")]
    names = {each.get("agent_context", {}).get("session_id") for each in events}
    asked = [each["request"] | each["request"]["replay"] for each in events]
    columns = ("input_length", "output_tokens", "request_received_ms")
    return summed(asked, *columns, len(names), units_per_s=1e3)


def num_tokens(text: str) -> int:
    """Return a text's tokens: one per four letters of a word, rounded up, and per other sign."""
    return sum(-(-len(piece) // 4) for piece in re.findall(r"\w+|[^\w\s]", text))


def sharegpt_totals() -> Totals:
    found = json.loads((FIXTURES / "sharegpt.json").read_text())
    prompts: list[int] = []
    answers: list[int] = []
    for each in found:
        before = 0
        for message in each["conversations"]:
            is_model = message["from"] == "gpt"
            role = num_tokens("<assistant>" if is_model else f"<{message['from']}>")
            said = num_tokens(message["value"])
            if is_model:
                prompts.append(before + role)
                answers.append(said)
            before += role + said
    return Totals(len(prompts), sum(prompts), sum(answers), 0, len(found))


def multi_turn_totals() -> Totals:
    marks = num_tokens("<user><assistant>")
    first = [num_tokens(text) for text in ("<system>Be brief and kind.What is a radix tree?",
             "Explain it to a child.", "And in one word?In French.")]  # fmt: skip
    one = marks + first[0]
    two = one + 40 + marks + first[1]
    three = two + 30 + marks + first[2]
    other = marks + num_tokens("hello world") + 1000  # of an image
    last = other + 5 + marks + num_tokens("Thanks.")
    prompts = [one, two, three, other, last]
    return Totals(5, sum(prompts), 40 + 30 + 10 + 5 + 2, 3.2505, 2)


def lmcache_totals() -> Totals:
    rows = {each["request_id"]: each for each in records("lmcache.jsonl")}  # one is asked twice
    found = list(rows.values())

    def begins(row: Any, later: Any) -> bool:
        blocks = row["chunk_hashes"]
        is_same = row["model_name"] == later["model_name"]
        return is_same and bool(blocks == later["chunk_hashes"][: len(blocks)])

    sessions = sum(
        not any(begins(earlier, row) for earlier in found[:n]) for n, row in enumerate(found)
    )
    asked = [row | {"answer": 1} for row in found]
    return summed(asked, "seq_len", "answer", "timestamp", sessions)


def sglang_totals() -> Totals:
    stores = [each for batch in records("sglang_kv_events.jsonl") for each in batch[1]]
    stores = [each for each in stores if each["type"] == "BlockStored"]
    depths: dict[int | None, int] = {None: 0}
    for each in stores:
        for number, block in enumerate(each["block_hashes"], start=1):
            depths[block] = depths[each["parent_block_hash"]] + number
    # the second event extends the first prompt; the fourth, fifth and last are answers
    ends = [depths[stores[n]["block_hashes"][-1]] for n in (1, 2, 5)]
    answers = [len(stores[n]["block_hashes"]) for n in (3, 4, 6)]
    return Totals(3, 16 * sum(ends), 16 * sum(answers), 12, 2)


def sessions_totals(name: str) -> Totals:
    """Return the Totals over the streams of a file: its sessions and their sub-agents."""
    streams: list[list[Any]] = [each["requests"] for each in records(name)]
    for stream in streams:  # which grows
        streams += [each["requests"] for each in stream if each["type"] == "subagent"]
    asked = [[each for each in stream if each["type"] != "subagent"] for stream in streams]
    spans = [max(each["t"] for each in x) - min(each["t"] for each in x) for x in asked]
    found = [each for stream in asked for each in stream]
    plain = summed(found, "in", "out", "t", len(streams))
    return plain._replace(span_s=round(sum(spans), 6))


def text_totals() -> Totals:
    found = [
        each | {"tokens": num_tokens(each["text_input"])} for each in records("aiperf_text.jsonl")
    ]
    return summed(found, "tokens", "output_length", "timestamp", 3, units_per_s=1e3)


def completions_totals() -> Totals:
    found = [each | each["usage"] for each in records("completions.jsonl")]
    return summed(found, "prompt_tokens", "completion_tokens", "created", 2)


BAILIAN_SESSIONS = sum(each["parent_chat_id"] == -1 for each in records("bailian.jsonl"))
BURST_GPT = ("Request tokens", "Response tokens", "Timestamp")
VIDUR = ("num_prefill_tokens", "num_decode_tokens", "arrived_at")
WANTED: dict[str, tuple[str, Totals]] = {
    "mooncake.jsonl": ("blocks", summed_rows("mooncake.jsonl", 2, units_per_s=1e3)),
    "bailian.jsonl": ("blocks", summed_rows("bailian.jsonl", BAILIAN_SESSIONS)),
    "azure.csv": ("lengths", azure_totals()),
    "burstgpt.csv": ("lengths", summed(rows("burstgpt.csv"), *BURST_GPT, 4)),
    "vidur.csv": ("lengths", summed(rows("vidur.csv"), *VIDUR, 3)),
    "dynamo.jsonl": ("dynamo", dynamo_totals()),
    "dynamo_shards": ("dynamo", dynamo_totals()),
    # by hand: 300, 300 + 40 + 150; 1024, 1024 + 64 + 100, 1188 + 8 + 10
    "aiperf_delta.jsonl": ("turns", Totals(5, 300 + 490 + 1024 + 1188 + 1206, 136, 2.7505, 2)),
    "aiperf_multi_turn.jsonl": ("chats", multi_turn_totals()),
    "aiperf_text.jsonl": ("chats", text_totals()),
    "completions.jsonl": ("chats", completions_totals()),
    # by hand: of the last prompt of two, the first has all full blocks
    "guidellm.jsonl": ("blocks", summed_rows("guidellm.jsonl", 2)),
    # by hand: the second turn of session a repeats the first, 750 ms after its answer
    "dynamo_converted.jsonl": ("blocks", Totals(3, 40 + 20 + 70, 8 + 4 + 5, 1.50025, 2)),
    "sharegpt.json": ("sharegpt", sharegpt_totals()),
    # by hand: blocks of 16: 3 prompt and 2 answer blocks, 7 prompt blocks, 3 prompt blocks
    "vllm_kv_events.jsonl": ("kv_events", Totals(3, 16 * 13, 32 + 1 + 1, 12, 2)),
    "sglang_kv_events.jsonl": ("kv_events", sglang_totals()),
    "kv_events_map.jsonl": ("kv_events", Totals(3, 16 * (3 + 1 + 2), 3, 9.5, 3)),
    "lmcache.jsonl": ("lmcache", lmcache_totals()),
    "agentx.jsonl": ("weka_agentic", sessions_totals("agentx.jsonl")),
    "kv_cache_tester.jsonl": ("weka_agentic", sessions_totals("kv_cache_tester.jsonl")),
}
UNITS = {"guidellm.jsonl": "s", "dynamo_converted.jsonl": "ms"}
DRAWN = ("aiperf_multi_turn.jsonl", *(name for name in WANTED if FORMS[WANTED[name][0]].is_drawn))


@pytest.mark.parametrize("name", WANTED)
def test_a_file_of_each_producer_is_read_with_the_totals_of_its_rows(name):
    form, wanted = WANTED[name]
    found = load(FIXTURES / name, time_unit=UNITS.get(name), think_cap_s=1e4)
    assert form_of(Trace(FIXTURES / name)) == form
    assert totals(found, is_drawn=name in DRAWN) == wanted


def test_the_usage_of_chat_completions_counts_reasoning_and_images():
    found = load(FIXTURES / "chat_completions.jsonl")
    usage = [each["usage"] for each in records("chat_completions.jsonl")]
    assert [each.output_len for each in found.requests] == [48, 11, 3]
    assert found.requests[2].prompt_len == usage[2]["prompt_tokens"]
    assert found.requests[1].parent_id == 0
    # the tools come first in both prompts
    first, second = found.requests[:2]
    assert shared_len(ids(first.prompt), ids(second.prompt)) >= 80
    # the reasoning is generated, and is not repeated by the next prompt
    assert shared_len(whole(first), ids(second.prompt)) <= first.prompt_len


def test_a_response_continues_the_one_that_it_names():
    found = load(FIXTURES / "responses.jsonl")
    assert [each.parent_id for each in found.requests] == [None, 0, None]
    assert [each.output_len for each in found.requests] == [90, 8, 4]
    first, second, _ = found.requests
    assert second.prompt_len > first.prompt_len
    assert found.counts["trace/differing_usage"] >= 1


def test_a_turn_with_a_delay_follows_the_turn_before_by_that_delay():
    found = load(FIXTURES / "aiperf_delta.jsonl").requests
    first, second, third = (each for each in found if each.session_name == "def-456")
    assert (second.think_ns, third.think_ns) == (500 * 10**6, 250_500_000)
    assert shared_len(whole(first), ids(second.prompt)) == 1024 + 64
    assert shared_len(whole(second), ids(third.prompt)) == 1188 + 8


def test_messages_with_a_delay_follow_the_answer_before_by_that_delay():
    found = load(FIXTURES / "aiperf_messages.jsonl").requests
    first, second = (each for each in found if each.session_name == "s1")
    assert (second.parent_id, second.think_ns) == (first.id, 1200 * 10**6)
    marks = num_tokens("<user><assistant>")
    assert first.prompt_len == marks + num_tokens("Plan a short trip.")
    assert second.prompt_len == first.prompt_len + 20 + marks + num_tokens("By train?")
    assert shared_len(whole(first), ids(second.prompt)) == first.prompt_len + 20


def test_equal_block_hashes_under_different_salts_share_no_prefix():
    first, second, other = load(FIXTURES / "vllm_kv_events.jsonl").requests
    assert first.namespace == second.namespace != other.namespace
    assert (second.parent_id, other.parent_id) == (0, None)


def test_the_salt_of_an_sglang_event_is_its_namespace(tmp_path):
    def stored(salt: str) -> list[Any]:
        salted = {"cache_salt": salt}
        return ["BlockStored", [1, 2], None, [0] * 32, 16, None, "GPU", salted]

    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{json.dumps([t, [stored(s)]])}\n" for t, s in ((1, "a"), (99, "b"))))
    assert [each.namespace for each in load(path).requests] == ["a", "b"]


@pytest.mark.parametrize("name", ["table.gz", "table.jsonl", "table"])
@pytest.mark.parametrize("container", ["csv", "tsv", "gzip", "zstd", "parquet"])
def test_the_format_of_a_file_is_found_by_its_content_and_not_its_name(tmp_path, name, container):
    plain, path = (FIXTURES / "vidur.csv").read_bytes(), tmp_path / name
    if container == "parquet":
        table = {key: [float(r[key]) for r in rows("vidur.csv")] for key in rows("vidur.csv")[0]}
        pq.write_table(pa.table(table), path)
    elif container == "zstd":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(plain)
    else:
        contents = {"csv": plain, "tsv": plain.replace(b",", b"\t"), "gzip": gzip.compress(plain)}
        path.write_bytes(contents[container])
    assert totals(load(path)) == WANTED["vidur.csv"][1]


def test_blocks_and_dates_are_read_from_parquet(tmp_path):
    found = records("mooncake.jsonl")
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "blocks.parquet")
    assert totals(load(tmp_path / "blocks.parquet")) == WANTED["mooncake.jsonl"][1]
    for each in found:
        each["timestamp"] = each["timestamp"] * 1000
    table = pa.Table.from_pylist(found)
    dates = table["timestamp"].cast(pa.timestamp("us"))
    pq.write_table(table.set_column(0, "timestamp", dates), tmp_path / "dates.parquet")
    assert totals(load(tmp_path / "dates.parquet")) == WANTED["mooncake.jsonl"][1]


def test_a_json_array_of_rows_is_read_like_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(records("bailian.jsonl")))
    assert totals(load(path)) == WANTED["bailian.jsonl"][1]


def test_a_file_of_an_unknown_form_is_refused_with_the_list_of_forms(tmp_path):
    path = tmp_path / "trace.bin"
    path.write_bytes(b"\x00\x01nothing\n")
    with pytest.raises(TraceError) as caught:
        load(path)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [f"  {form.fields[0]}: {form.contents}" for form in FORMS.values()]


def test_the_page_of_traces_names_every_form():
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    assert [form.fields[0] for form in FORMS.values() if f"`{form.fields[0]}" not in page] == []


def test_records_have_the_session_names_of_the_trace(tmp_path):
    load = (f"workload.path={FIXTURES / 'dynamo.jsonl'}", "workload=trace", "prefetch.threshold=1")
    write_requests(tmp_path, run(config_of(*load)).records)
    names = ["main", "helper-2", *["helper-1"] * 3, "main", "other", "main"]
    assert list(read_requests(tmp_path)["session_name"]) == names


def test_a_missing_package_for_zstd_is_named(tmp_path, capsys, monkeypatch):
    path = tmp_path / "t.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write((FIXTURES / "mooncake.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("sys.argv", ["hicache", "run", f"workload.path={path}"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "pyarrow is not installed: pip install" in capsys.readouterr().err


def test_files_beside_the_shards_of_a_trace_are_ignored(tmp_path):
    for name in ("LICENSE", "README.txt", ".hidden"):
        (tmp_path / name).write_text("no rows\n")
    (tmp_path / "trace.000.jsonl").write_text("")
    (tmp_path / "trace.001.jsonl").write_bytes((FIXTURES / "mooncake.jsonl").read_bytes())
    assert totals(load(tmp_path)) == WANTED["mooncake.jsonl"][1]
