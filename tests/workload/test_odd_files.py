"""Files as users have them: odd rows, other units and sizes; they are read right or refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hicache.cli.main import main
from hicache.workload import trace
from hicache.workload.trace import OddRow, TraceError, time_ns
from hicache.workload.workload import Workload
from tests.workload.traces import load, write_lines

Row = dict[str, Any]


def block_rows(number: int, *, step: float = 1000) -> list[Row]:
    return [
        {"timestamp": step * n, "input_length": 1024, "output_length": 5, "hash_ids": [2 * n, 9]}
        for n in range(number)
    ]


def load_rows(folder: Path, rows: list[Any], **settings: Any) -> Workload:
    return load(write_lines(folder / "t.jsonl", rows), **settings)


def span_s(found: Workload) -> float:
    return (found.requests[-1].arrival_ns - found.requests[0].arrival_ns) / 1e9


def lengths(found: Workload) -> list[tuple[int, int]]:
    return [(each.prompt_len, each.output_len) for each in found.requests]


# -- units -------------------------------------------------------------------------------------


def test_times_of_rows_with_the_fields_of_bailian_are_seconds(tmp_path):
    named = {"parent_chat_id": -1, "turn": 1, "type": "text"}
    rows = [row | named | {"chat_id": n} for n, row in enumerate(block_rows(3, step=2.5))]
    assert span_s(load_rows(tmp_path, rows)) == 5


@pytest.mark.parametrize(
    ("first", "step", "told", "spans_s"),
    [
        (0, 2.5, r"line 2: .* set workload\.time_unit to s or ms", {"s": 5, "ms": 0.005}),
        (1_700_000_000, 60, r"line 1: .*since 1970.* set workload\.time_unit", {"s": 120}),
    ],
)
def test_times_in_an_uncertain_unit_need_the_unit_set(tmp_path, first, step, told, spans_s):
    rows = [row | {"timestamp": first + row["timestamp"]} for row in block_rows(3, step=step)]
    with pytest.raises(TraceError, match=told):
        load_rows(tmp_path, rows)
    for unit, wanted in spans_s.items():
        assert span_s(load_rows(tmp_path, rows, time_unit=unit)) == wanted


@pytest.mark.parametrize(("step", "is_noted"), [(1, True), (1000, False), (10**6, True)])
def test_an_implausible_time_span_is_noted_and_printed(tmp_path, capsys, step, is_noted):
    found = load_rows(tmp_path, block_rows(20, step=step))
    assert ("set workload.time_unit" in capsys.readouterr().err) is is_noted
    assert any("set workload.time_unit" in note for note in found.notes) is is_noted


def test_notes_name_the_unit_the_block_size_and_the_rule_of_sessions(tmp_path):
    notes = load_rows(tmp_path, block_rows(3)).notes
    assert [note.partition(",")[0].partition(":")[0] for note in notes] == [
        "times read in ms",
        "blocks of 512 tokens",
        "sessions inferred",
    ]


@pytest.mark.parametrize("fraction", ["", ".5", ".500000", ".5000000"])
def test_the_time_zone_of_a_date_is_applied(tmp_path, fraction):
    path = tmp_path / "t.csv"
    path.write_text(
        "timestamp,input_length,output_length\n"
        f"2024-10-27 02:59:59{fraction}+02:00,100,5\n2024-10-27 02:00:00{fraction}+01:00,100,5\n"
    )
    assert span_s(load(path)) == 1


# -- odd rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"input_length": None}, "input_length must be an integer, got null"),
        ({"input_length": "many"}, "input_length must be an integer, got text"),
        ({"input_length": ...}, "input_length is missing"),
        ({"input_length": 10**400}, "input_length"),
        ({"timestamp": -1}, "timestamp must be a number of at least 0"),
        ({"timestamp": 10**400}, "timestamp"),
        ({"timestamp": None}, "it has no time"),
        ({"timestamp": "now"}, "timestamp must be a number or a date"),
        ({"timestamp": float("inf")}, "not JSON"),
        ({"timestamp": 1e30}, "its time is after the year 2106: check the unit"),
        ({"timestamp": 1.7e12}, "it arrives more than ten years after"),
        ({"session_id": [1]}, "session_id must be an integer or text, got a list"),
        ({"input_length": 0}, "input_length must be an integer of at least 1"),
        ({"hash_ids": "0"}, "hash_ids must be a list or null, got text"),
        ({"hash_ids": [0, 1.5]}, "hash_ids[1] must be an integer or text, got a number"),
        ({"hash_ids": [1]}, "1024 prompt tokens need 2 blocks of 512"),
        ('{"timestamp": 5, "input_le', "not JSON"),
        ("[1, 2]", "the row must be an object"),
        ('{"hash_ids": ["\udcff"]}', "not JSON"),  # no UTF-8
        ("[" * 5000 + "]" * 5000, "too deeply nested"),
    ],
    ids=range(20),
)
def test_an_odd_row_is_left_out_counted_and_noted(tmp_path, odd, why):
    rows = block_rows(8)
    if isinstance(odd, dict):
        rows[5] = {key: value for key, value in (rows[5] | odd).items() if value is not ...}
    lines = [json.dumps(row) for row in rows]
    if isinstance(odd, str):
        lines[5] = odd
    path = tmp_path / "t.jsonl"
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    found = load(path)
    assert len(found.requests) == 7
    assert found.counts == {"trace/left_out_rows": 1}
    (note,) = (each for each in found.notes if "left out" in each)
    assert note.startswith("1 of 8 rows left out: ")
    assert why in note
    assert note.endswith("t.jsonl, line 6)")


@pytest.mark.parametrize("odd", [{"output_length": 0}, {"output_length": None}, {}])
def test_a_request_without_an_answer_gets_one_answer_token(tmp_path, odd):
    rows = block_rows(3)
    del rows[1]["output_length"]
    rows[1] |= odd
    found = load_rows(tmp_path, rows)
    assert lengths(found) == [(1024, 5), (1024, 1), (1024, 5)]
    assert found.counts == {"trace/completed_rows": 1}
    assert any("1 rows completed" in note and "line 2" in note for note in found.notes)


def test_a_trace_without_answers_gets_the_configured_length(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "output_length"} for row in block_rows(3)]
    found = load_rows(tmp_path, rows, answer_tokens=7)
    assert lengths(found) == [(1024, 7)] * 3
    assert found.counts == {}
    assert "each has 7 tokens (workload.answer_tokens)" in "".join(found.notes)


def test_notes_name_at_most_eight_reasons(tmp_path):
    rows = block_rows(200)
    for n, row in enumerate(rows[:20]):
        row["input_length"] = 2000 + 600 * n
    notes = load_rows(tmp_path, rows).notes
    assert sum("left out" in note for note in notes) == 8
    assert notes[-1] == "12 other reasons why rows are odd"


@pytest.mark.parametrize(
    ("parents", "counts"),
    [([90, 91, 92], {"trace/outside_parents": 3}), (["-1"] * 3, {}), ([-1] * 3, {})],
)
def test_parents_outside_the_file_are_counted_and_ignored(tmp_path, parents, counts):
    pairs = zip(block_rows(3), enumerate(parents), strict=True)
    rows = [row | {"chat_id": str(n), "parent_chat_id": parent} for row, (n, parent) in pairs]
    found = load_rows(tmp_path, rows)
    assert [each.parent_id for each in found.requests] == [None] * 3
    assert found.counts == counts


@pytest.mark.parametrize(
    ("num_odd", "share", "is_read"),
    [(3, 0.1, True), (4, 0.1, False), (4, 0.2, True), (16, 1, True)],
)
def test_too_many_odd_rows_are_an_error(tmp_path, num_odd, share, is_read):
    rows = block_rows(20)
    for row in rows[2 : 2 + num_odd]:
        row["input_length"] = -1
    if is_read:
        assert len(load_rows(tmp_path, rows, odd_rows=share).requests) == 20 - num_odd
        return
    with pytest.raises(TraceError, match=r"line 3: .*line 5: .* … \(4 of 20 rows .* at most 3"):
        load_rows(tmp_path, rows, odd_rows=share)


def test_the_command_ends_with_code_2_if_too_many_rows_are_odd(tmp_path, capsys, monkeypatch):
    rows = [row | {"input_length": None} if n % 2 else row for n, row in enumerate(block_rows(8))]
    path = write_lines(tmp_path / "t.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hicache", "run", f"workload.path={path}"])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert "line 2: input_length" in error
    assert "4 of 8 rows" in error


def test_a_table_in_utf_16_is_read(tmp_path):
    path = tmp_path / "t.txt"
    table = "timestamp\tinput_length\toutput_length\n0\t10\t2\n7\t10\t2\n"
    path.write_bytes(table.encode("utf-16"))
    assert span_s(load(path)) == 7


# -- texts -------------------------------------------------------------------------------------


def chat(**more: Any) -> Row:
    return {"created": 1, "messages": [{"role": "user", "content": "hello"}]} | more


THINKING = {"role": "assistant", "content": "ok", "reasoning_content": "think " * 400}
HIDDEN = {"completion_tokens": 505, "completion_tokens_details": {"reasoning_tokens": 500}}


@pytest.mark.parametrize(
    ("row", "answer_len", "counts"),
    [
        ({"choices": [{"message": THINKING}]}, 802, {}),
        (
            {"choices": [{"message": THINKING}], "usage": {"completion_tokens": 505}},
            505,
            {"trace/differing_usage": 1},
        ),
        ({"response": "ok", "usage": HIDDEN}, 505, {"trace/differing_usage": 1}),
        ({"choices": [{"delta": {"content": "one two three"}}]}, 4, {}),  # a part of a stream
        ({"response": {"choices": [{"message": {"content": "one two"}}]}}, 2, {}),
    ],
)
def test_the_answer_of_a_chat_includes_its_reasoning(tmp_path, row, answer_len, counts):
    found = load_rows(tmp_path, [chat(**row)])
    assert [each.output_len for each in found.requests] == [answer_len]
    assert found.counts == counts


def test_a_turn_continues_the_response_whose_message_it_repeats(tmp_path):
    def says(text: str) -> dict[str, Any]:
        thought = {"type": "reasoning", "content": [{"type": "text", "text": "think " * 40}]}
        return {"output": [thought, {"type": "message", "role": "assistant", "content": text}]}

    asked = [{"role": "user", "content": "Tell a joke."}]
    said = {"role": "assistant", "content": "a joke"}
    rows = [
        {"created_at": 1, "input": asked} | says("a joke"),
        {"created_at": 2, "input": asked} | says("another"),
        {"created_at": 9, "input": [*asked, said, *asked]} | says("a third"),
    ]
    assert [each.parent_id for each in load_rows(tmp_path, rows).requests] == [None, None, 0]


DATA_URL = "data:image/png;base64," + "A" * 40_000


@pytest.mark.parametrize(
    "content",
    [
        DATA_URL,
        [{"image": DATA_URL}],
        [{"type": "text", "text": DATA_URL}],
        [{"type": "image_url", "image_url": {"url": DATA_URL}}],
    ],
    ids=range(4),
)
def test_the_data_of_an_image_is_not_counted_as_text(tmp_path, content):
    row = chat(messages=[{"role": "user", "content": content}], response="ok")
    (found,) = load_rows(tmp_path, [row]).requests
    assert found.prompt_len < 2000
    (found,) = load_rows(tmp_path, [row | {"usage": {"prompt_tokens": 1050}}]).requests
    assert found.prompt_len == 1050


def test_equal_images_of_two_turns_have_equal_tokens(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    first, repeated = (  # a client may write the fields in another order
        {"role": "user", "content": [dict(fields)]}
        for fields in (image.items(), reversed(image.items()))
    )
    answer, again = ({"role": role, "content": "a bear"} for role in ("assistant", "user"))
    rows = [
        chat(messages=[first], response="a bear"),
        chat(created=9, messages=[repeated, answer, again], response="y"),
    ]
    first, second = load_rows(tmp_path, rows).requests
    assert second.parent_id == 0
    assert first.prompt.starts[0] == second.prompt.starts[0]


def test_chats_of_two_models_or_salts_have_different_namespaces(tmp_path):
    fields: list[Row] = [{}, {"model": "b"}, {"cache_salt": "s"}, {}]
    rows = [chat(created=n, response="ok", **more) for n, more in enumerate(fields)]
    names = [each.namespace for each in load_rows(tmp_path, rows).requests]
    assert names == ["", "tenant-1", "tenant-2", ""]


def test_a_log_without_its_text_has_the_lengths_of_its_usage(tmp_path):
    usage = {"prompt_tokens": 500, "completion_tokens": 7}
    empty = [{"role": "user", "content": None}]
    rows = [{"created": 1, "usage": usage}, {"created": 2, "usage": usage, "messages": empty}]
    found = load_rows(tmp_path, rows)
    assert lengths(found) == [(500, 7)] * 2
    assert found.counts == {}


def test_messages_of_aiperf_have_times_in_ms(tmp_path):
    rows = [{"timestamp": 1000 * n, "text_input": "hello", "output_length": 4} for n in (1, 3)]
    found = load_rows(tmp_path, rows)
    assert span_s(found) == 2
    assert [each.output_len for each in found.requests] == [4, 4]
    assert "times read in ms, as the rows name no unit (workload.time_unit)" in found.notes


# -- KV events ---------------------------------------------------------------------------------


def event(time: float, first: int, last: int, parent: int | None = None, **more: Any) -> list[Any]:
    """Return a batch of one KV event at `time` s: stores blocks [first, last) of 64 tokens each."""
    stored = {"type": "BlockStored", "token_ids": [], "block_size": 64}
    blocks = {"block_hashes": [*range(first, last)], "parent_block_hash": parent}
    return [time, [stored | blocks | more]]


def test_kv_events_of_full_attention_are_found_by_group_kind_and_not_number(tmp_path):
    states = {"group_idx": 0, "kv_cache_spec_kind": "mamba"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    rows = [event(1, 900, 901, **states), event(1, 0, 10, **full), event(9, 10, 20, 9, **full)]
    assert [each.prompt_len for each in load_rows(tmp_path, rows).requests] == [640, 1280]
    with pytest.raises(TraceError, match=r"no group .* full attention .*0: mamba"):
        load_rows(tmp_path, rows[:1])


def test_kv_events_that_name_the_gpu_in_lower_case_are_read(tmp_path):
    rows = [event(1, 0, 4, medium="gpu", locality="local"), event(2, 5, 9, medium="cpu")]
    assert [each.prompt_len for each in load_rows(tmp_path, rows).requests] == [256]


def test_a_cycle_of_blocks_is_refused_with_its_line(tmp_path):
    rows = [event(1, 1, 3), event(2, 1, 2, 2), event(99, 7, 8, 1)]
    with pytest.raises(TraceError, match="line 2: a block is stored below itself or its own child"):
        load_rows(tmp_path, rows)


def test_children_of_a_block_are_in_its_namespace(tmp_path):
    rows = [event(1, 1, 5, lora_name="a"), event(2, 1, 5, lora_name="b")]
    found = load_rows(tmp_path, [*rows, event(3, 11, 15, 4, lora_name="a")])
    assert [each.namespace for each in found.requests] == ["a", "b"]
    assert lengths(found) == [(256, 256), (256, 1)]
    rows = []
    for time, salt in ((1, "a"), (100, "b")):
        keys = [[salt], None, None, None]
        rows += [event(time, 1, 5, extra_keys=keys), event(time + 1, 11, 15, 4)]
    found = load_rows(tmp_path, rows)
    assert [each.namespace for each in found.requests] == ["['a']", "['b']"]
    assert len(set(lengths(found))) == 1


# -- sessions ----------------------------------------------------------------------------------


def weka(name: str, requests: list[Row]) -> Row:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def asked(t: float, blocks: list[Any]) -> Row:
    return {"t": t, "in": 64 * len(blocks), "out": 5, "hash_ids": blocks, "api_time": 1.0}


TURNS = [asked(7.5 * n, [*range(n + 2)]) for n in range(4)]


@pytest.mark.parametrize("blocks", [[[0, 1]] * 5, [[n, n + 1] for n in range(5)]])
def test_sessions_of_equal_lengths_are_not_merged(tmp_path, blocks):
    rows = [weka(f"s{n}", [asked(0, each)]) for n, each in enumerate(blocks)]
    assert len({each.session_id for each in load_rows(tmp_path, rows).requests}) == 5


def test_a_second_recording_of_a_session_is_left_out_and_noted(tmp_path):
    found = load_rows(tmp_path, [weka("long", TURNS), weka("short", TURNS[:3])])
    assert len(found.requests) == 4
    assert any("1 of 2 sessions left out" in note for note in found.notes)
    rows = [weka(f"s{n}", [*TURNS, asked(40, [0, n + 90])]) for n in range(3)]
    assert len(load_rows(tmp_path, rows).requests) == 15


def test_a_file_of_sessions_without_requests_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"t\.jsonl: no requests"):
        load_rows(tmp_path, [weka("s", [])], max_context=None)


@pytest.mark.parametrize("block", [2**63, 2**64 - 1, -5, "e3b0c442", 10**30])
def test_blocks_of_sessions_may_have_any_id(tmp_path, block):
    (found,) = load_rows(tmp_path, [weka("s", [asked(0, [1, block, 3])])]).requests
    assert found.prompt_len == 192


def test_sessions_nested_too_deeply_are_left_out(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", [weka(n, [asked(0, [1])]) for n in "ac"])
    deep = '{"t": 0, "type": "subagent", "requests": [' * 3000 + "]}" * 3000
    path.write_text(path.read_text() + f'{{"id": "b", "requests": [{deep}]}}\n')
    found = load(path)
    assert {each.session_name for each in found.requests} == {"a", "c"}
    assert found.counts == {"trace/left_out_rows": 1}


@pytest.mark.parametrize("odd", [{"in": None}, {"in": 0}, {"in": "x"}, {"t": -1}, {"out": 1.5}])
def test_an_odd_request_of_a_session_is_left_out(tmp_path, odd):
    found = load_rows(tmp_path, [weka("a", [*TURNS[:2], TURNS[2] | odd, TURNS[3]])])
    assert [each.prompt_len for each in found.requests] == [128, 192, 320]
    assert [each.parent_id for each in found.requests] == [None, 0, 1]
    assert found.counts == {"trace/left_out_rows": 1}
    assert any("line 1, request 2)" in note for note in found.notes)


# -- files and folders -------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["gzip", "zstd"])
def test_a_small_file_that_unpacks_to_many_bytes_is_refused(tmp_path, monkeypatch, container):
    monkeypatch.setattr(trace, "RATIO_FROM", 1 << 20)
    path, rows = tmp_path / "t.jsonl", b" " * (3 << 20)
    if container == "gzip":
        path.write_bytes(gzip.compress(rows))
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(rows)
    with pytest.raises(TraceError, match=r"unpacks to more than 1 MiB, .*: unpack it first"):
        load(path)


@pytest.mark.parametrize("num_files", [3, 30])
def test_the_limit_on_unpacked_bytes_holds_for_all_files_of_a_folder_together(
    tmp_path, monkeypatch, num_files
):
    monkeypatch.setattr(trace, "RATIO_FROM", 1 << 20)
    rows = "".join(f"{json.dumps(row)}\n" for row in block_rows(2)) + "\n" * (1 << 16)
    for number in range(num_files):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    if num_files == 3:
        assert len(load(tmp_path).requests) == 6
        return
    with pytest.raises(TraceError, match=r"jsonl\.gz unpacks to more than 1 MiB"):
        load(tmp_path)


def test_the_shards_of_a_folder_are_read_in_the_order_of_their_numbers(tmp_path):
    for n in range(12):
        write_lines(tmp_path / f"events.{n}.jsonl", [event(n, n, n + 1, n - 1 if n else None)])
    (found,) = load(tmp_path).requests
    assert found.prompt_len + found.output_len == 12 * 64


def test_the_license_in_a_folder_of_rows_is_not_read(tmp_path):
    (tmp_path / "LICENSE").write_text("Permission is granted.\n" * 9)
    write_lines(tmp_path / "rows.jsonl", block_rows(2))
    assert len(load(tmp_path).requests) == 2


def test_a_wrong_entry_of_a_list_is_named_by_its_place(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([*block_rows(1), "nonsense"]))
    with pytest.raises(TraceError, match=r"rows\.json, entry 2"):
        load(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match="the folder holds no files"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1.5, 1_500_000_000),
        ("2", 2_000_000_000),
        ("1970-01-02T00:00:01.25", 86_401_250_000_000),
        ("1970-01-01T03:00:00+02:00", 3_600_000_000_000),
        ("1970-01-01T03:00:00-02:00", 5 * 3_600_000_000_000),
    ],
)
def test_a_time_is_a_number_or_a_date_which_without_a_zone_is_in_utc(value, wanted):
    assert time_ns(value, 10**9) == wanted


@pytest.mark.parametrize("value", [True, None, "soon", "0001-01-01T00:00:00+23:00x", [1]])
def test_a_time_that_is_neither_a_number_nor_a_date_is_refused(value):
    with pytest.raises(OddRow, match="t must be a number or a date"):
        time_ns(value, 1, "t")
