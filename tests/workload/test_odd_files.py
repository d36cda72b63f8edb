"""Files as people have them: odd rows, other units, other sizes; read right, or refused by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hicache.cli.main import main
from hicache.workload import trace
from hicache.workload.trace import TraceError
from hicache.workload.workload import Workload
from tests.workload.test_forms import load
from tests.workload.traces import write_lines

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


# units


def test_times_of_bailian_are_seconds_by_its_fields(tmp_path: Path) -> None:
    named = {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"}
    rows = [row | named | {"chat_id": n} for n, row in enumerate(block_rows(3, step=2.5))]
    assert span_s(load_rows(tmp_path, rows)) == 5


def test_a_fraction_without_a_unit_asks_for_the_unit(tmp_path: Path) -> None:
    rows = block_rows(3, step=2.5)
    with pytest.raises(TraceError, match=r"line 2: .* set workload\.time_unit to s or ms"):
        load_rows(tmp_path, rows)
    assert span_s(load_rows(tmp_path, rows, time_unit="s")) == 5
    assert span_s(load_rows(tmp_path, rows, time_unit="ms")) == 0.005


def test_a_date_in_seconds_asks_for_the_unit(tmp_path: Path) -> None:
    rows = [row | {"timestamp": 1_700_000_000 + 60 * n} for n, row in enumerate(block_rows(3))]
    with pytest.raises(TraceError, match=r"line 1: .*since 1970.* set workload\.time_unit"):
        load_rows(tmp_path, rows)
    assert span_s(load_rows(tmp_path, rows, time_unit="s")) == 120


@pytest.mark.parametrize(("step", "is_told"), [(1, True), (1000, False), (10**6, True)])
def test_an_implausible_span_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, *, is_told: bool
) -> None:
    found = load_rows(tmp_path, block_rows(20, step=step))
    told = "20 requests arrive within .* set workload.time_unit"
    assert ("set workload.time_unit" in capsys.readouterr().err) is is_told
    assert any("set workload.time_unit" in note for note in found.notes) is is_told, told


def test_the_unit_the_block_size_and_the_rule_of_sessions_are_printed(tmp_path: Path) -> None:
    notes = load_rows(tmp_path, block_rows(3)).notes
    assert [note.partition(",")[0].partition(":")[0] for note in notes] == [
        "times read in ms",
        "blocks of 512 tokens",
        "sessions inferred",
    ]


@pytest.mark.parametrize("fraction", ["", ".5", ".500000", ".5000000"])
def test_the_zone_of_a_date_counts(tmp_path: Path, fraction: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "timestamp,input_length,output_length\n"
        f"2024-10-27 02:59:59{fraction}+02:00,100,5\n2024-10-27 02:00:00{fraction}+01:00,100,5\n"
    )
    assert span_s(load(path)) == 1


# odd rows

ODD: dict[str, tuple[Row | str, str]] = {
    "null": ({"input_length": None}, "input_length must be an integer, got null"),
    "text": ({"input_length": "many"}, "input_length must be an integer, got text"),
    "negative": ({"timestamp": -1}, "timestamp must be a number of at least 0"),
    "400 digits": ({"timestamp": 10**400}, "timestamp"),
    "400 digits of tokens": ({"input_length": 10**400}, "input_length"),
    "half a line": ('{"timestamp": 5, "input_le', "not JSON"),
    "no object": ("[1, 2]", "the row must be an object"),
    "no UTF-8": ('{"hash_ids": ["\udcff"]}', "not JSON"),
    "deeply nested": ("[" * 5000 + "]" * 5000, "too deeply nested"),
    "no time": ({"timestamp": None}, "it has no time"),
    "blocks of another size": ({"hash_ids": [1]}, "1024 prompt tokens need 2 blocks of 512"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_row_is_left_out_and_counted(tmp_path: Path, name: str) -> None:
    odd, why = ODD[name]
    lines = [json.dumps(row) for row in block_rows(8)]
    lines[5] = odd if isinstance(odd, str) else json.dumps(block_rows(8)[5] | odd)
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
def test_a_request_without_an_answer_runs_with_one_token(tmp_path: Path, odd: Row) -> None:
    rows = block_rows(3)
    del rows[1]["output_length"]
    rows[1] |= odd
    found = load_rows(tmp_path, rows)
    assert [each.output_len for each in found.requests] == [5, 1, 5]
    assert found.counts == {"trace/completed_rows": 1}
    assert any("1 rows completed" in note and "line 2" in note for note in found.notes)


def test_answers_that_no_row_has_get_the_length_that_is_set(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "output_length"} for row in block_rows(3)]
    found = load_rows(tmp_path, rows, answer_tokens=7)
    assert [each.output_len for each in found.requests] == [7] * 3
    assert found.counts == {}


def test_a_parent_outside_the_file_is_none(tmp_path: Path) -> None:
    rows = [row | {"chat_id": n, "parent_chat_id": 90 + n} for n, row in enumerate(block_rows(3))]
    found = load_rows(tmp_path, rows)
    assert [each.parent_id for each in found.requests] == [None] * 3
    assert found.counts == {"trace/outside_parents": 3}


@pytest.mark.parametrize(("num_odd", "share", "is_read"), [
    (3, 0.1, True), (4, 0.1, False), (4, 0.2, True), (16, 1, True),
])  # fmt: skip
def test_too_many_odd_rows_are_an_error(
    tmp_path: Path, num_odd: int, share: float, *, is_read: bool
) -> None:
    rows = block_rows(20)
    for row in rows[2 : 2 + num_odd]:
        row["input_length"] = -1
    if is_read:
        assert len(load_rows(tmp_path, rows, odd_rows=share).requests) == 20 - num_odd
        return
    with pytest.raises(TraceError, match=r"line 3: .*line 5: .* … \(4 of 20 rows .* at most 3"):
        load_rows(tmp_path, rows, odd_rows=share)


def test_a_file_with_too_many_odd_rows_ends_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row | {"input_length": None} if n % 2 else row for n, row in enumerate(block_rows(8))]
    path = write_lines(tmp_path / "t.jsonl", rows)
    told = ["run", f"workload.path={path}", "tracker.wandb_mode=disabled"]
    monkeypatch.setattr("sys.argv", ["hicache", *told, f"hydra.run.dir={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "line 2: input_length" in error
    assert "4 of 8 rows" in error


def test_a_parent_of_minus_one_is_none_as_text_too(tmp_path: Path) -> None:
    rows = [
        row | {"chat_id": f"{n}", "parent_chat_id": "-1"} for n, row in enumerate(block_rows(3))
    ]
    assert load_rows(tmp_path, rows).counts == {}


def test_a_table_in_utf_16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(
        "timestamp\tinput_length\toutput_length\n0\t10\t2\n7\t10\t2\n".encode("utf-16")
    )
    assert span_s(load(path)) == 7


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    rows: list[Row] = block_rows(8)
    del rows[3]["input_length"]
    assert any("input_length is missing" in note for note in load_rows(tmp_path, rows).notes)


# what a file says beside what was read


def chat(**more: Any) -> Row:
    return {"created": 1, "messages": [{"role": "user", "content": "hello"}]} | more


def test_reasoning_is_part_of_the_answer(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "ok", "reasoning_content": "think " * 400}
    told = {"choices": [{"message": message}]}
    (found,) = load_rows(tmp_path, [chat(**told)]).requests
    assert 800 <= found.output_len <= 802  # a space, `thin` and `k`
    (found,) = load_rows(tmp_path, [chat(**told, usage={"completion_tokens": 505})]).requests
    assert found.output_len == 505


def test_hidden_reasoning_is_counted_by_usage(tmp_path: Path) -> None:
    usage = {"completion_tokens": 505, "completion_tokens_details": {"reasoning_tokens": 500}}
    found = load_rows(tmp_path, [chat(response="ok", usage=usage)])
    assert found.requests[0].output_len == 505
    assert found.counts == {"trace/differing_usage": 1}


def test_an_image_counts_by_usage_or_by_the_number_that_is_set(tmp_path: Path) -> None:
    url = {"url": "data:image/png;base64," + "A" * 40_000}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "hello"}]
    row = chat(messages=[{"role": "user", "content": content}], response="ok")
    counted = row | {"usage": {"prompt_tokens": 1050}}
    assert load_rows(tmp_path, [counted]).requests[0].prompt_len == 1050
    plain = load_rows(tmp_path, [chat(response="ok")]).requests[0].prompt_len
    (found,) = load_rows(tmp_path, [row], image_tokens=600).requests
    assert found.prompt_len == plain + 600


@pytest.mark.parametrize("content", ["see {}", [{"image": "{}"}], [{"type": "text", "text": "{}"}]])
def test_a_data_url_in_a_text_is_no_text(tmp_path: Path, content: Any) -> None:
    url = "data:image/png;base64," + "A" * 40_000
    message = json.loads(json.dumps({"role": "user", "content": content}).replace("{}", url))
    (found,) = load_rows(tmp_path, [chat(messages=[message], response="ok")]).requests
    assert found.prompt_len < 2000


def test_the_chunk_of_a_stream_is_the_answer(tmp_path: Path) -> None:
    row = chat(choices=[{"delta": {"content": "one two three"}}])
    assert load_rows(tmp_path, [row]).requests[0].output_len == 4


def test_equal_images_of_two_turns_are_shared(tmp_path: Path) -> None:
    image = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    first = {"role": "user", "content": image}
    turns = [
        first,
        {"role": "assistant", "content": "a bear"},
        {"role": "user", "content": "sure?"},
    ]
    rows = [
        chat(messages=[first], response="a bear"),
        chat(created=9, messages=turns, response="y"),
    ]
    found = load_rows(tmp_path, rows, image_tokens=64)
    assert found.requests[1].parent_id == 0
    assert found.requests[0].prompt.starts[0] == found.requests[1].prompt.starts[0]


def events(*batches: tuple[float, Row]) -> list[Any]:
    common = {"type": "BlockStored", "token_ids": [], "block_size": 64}
    return [[time, [common | event]] for time, event in batches]


def stored(first: int, last: int, parent: int | None = None, **more: Any) -> Row:
    return {"block_hashes": [*range(first, last)], "parent_block_hash": parent} | more


def test_the_kind_of_a_group_and_not_its_number_says_full_attention(tmp_path: Path) -> None:
    states = {"group_idx": 0, "kv_cache_spec_kind": "mamba"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    rows = events(
        (1.0, stored(900, 901, **states)),
        (1.0, stored(0, 10, **full)),
        (9.0, stored(10, 20, 9, **full)),
    )
    found = load_rows(tmp_path, rows)
    assert [each.prompt_len for each in found.requests] == [640, 1280]
    with pytest.raises(TraceError, match=r"no group .* full attention .*0: mamba"):
        load_rows(tmp_path, rows[:1])


def test_the_device_may_be_in_lower_case(tmp_path: Path) -> None:
    rows = events(
        (1.0, stored(0, 4, medium="gpu", locality="local")), (2.0, stored(5, 9, medium="cpu"))
    )
    assert [each.prompt_len for each in load_rows(tmp_path, rows).requests] == [256]


def test_a_cycle_of_blocks_is_refused_by_its_line(tmp_path: Path) -> None:
    rows = events((1, stored(1, 3)), (2, stored(1, 2, 2)), (99, stored(7, 8, 1)))
    with pytest.raises(TraceError, match="line 2: a block is stored below itself or its own child"):
        load_rows(tmp_path, rows)


def test_children_of_an_adapters_block_stay_with_it(tmp_path: Path) -> None:
    rows = events(
        (1, stored(1, 5, lora_name="a")),
        (2, stored(1, 5, lora_name="b")),
        (3, stored(11, 15, 4, lora_name="a")),
    )
    found = load_rows(tmp_path, rows).requests
    assert [(each.namespace, each.prompt_len) for each in found] == [("a", 256), ("b", 256)]
    assert [each.output_len for each in found] == [256, 1]


def test_children_of_a_salted_block_stay_in_its_namespace(tmp_path: Path) -> None:
    rows = events(
        (1, stored(1, 5, extra_keys=[["a"], None, None, None])),
        (2, stored(11, 15, 4)),
        (100, stored(1, 5, extra_keys=[["b"], None, None, None])),
        (101, stored(11, 15, 4)),
    )
    found = load_rows(tmp_path, rows).requests
    assert [each.namespace for each in found] == ["['a']", "['b']"]
    assert len({each.prompt_len for each in found}) == 1


# sessions


def weka(name: str, requests: list[Row]) -> Row:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def asked(t: float, blocks: list[Any]) -> Row:
    return {"t": t, "in": 64 * len(blocks), "out": 5, "hash_ids": blocks, "api_time": 1.0}


@pytest.mark.parametrize("blocks", [[[0, 1]] * 5, [[n, n + 1] for n in range(5)]])
def test_sessions_of_equal_lengths_are_different(tmp_path: Path, blocks: list[list[int]]) -> None:
    rows = [weka(f"s{n}", [asked(0, each)]) for n, each in enumerate(blocks)]
    assert len({each.session_id for each in load_rows(tmp_path, rows).requests}) == 5


def test_a_second_recording_of_a_session_is_left_out_and_told(tmp_path: Path) -> None:
    turns = [asked(7.5 * n, [*range(n + 2)]) for n in range(4)]
    found = load_rows(tmp_path, [weka("long", turns), weka("short", turns[:3])])
    assert len(found.requests) == 4
    assert any("1 of 2 sessions left out" in note for note in found.notes)


def test_sessions_that_differ_after_some_requests_are_both_kept(tmp_path: Path) -> None:
    turns = [asked(7.5 * n, [*range(n + 2)]) for n in range(4)]
    rows = [weka(f"s{n}", [*turns, asked(40, [0, n + 90])]) for n in range(3)]
    assert len(load_rows(tmp_path, rows).requests) == 15


def test_a_file_of_sessions_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl: no requests"):
        load_rows(tmp_path, [weka("s", [])], max_context=None)


@pytest.mark.parametrize("block", [2**63, 2**64 - 1, -5, "e3b0c442", 10**30])
def test_blocks_of_sessions_may_have_any_id(tmp_path: Path, block: Any) -> None:
    (found,) = load_rows(tmp_path, [weka("s", [asked(0, [1, block, 3])])]).requests
    assert found.prompt_len == 192


def test_sessions_nested_too_deeply_are_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [weka(n, [asked(0, [1])]) for n in "ac"])
    deep = '{"t": 0, "type": "subagent", "requests": [' * 3000 + "]}" * 3000
    path.write_text(path.read_text() + f'{{"id": "b", "requests": [{deep}]}}\n')
    found = load(path)
    assert {each.session_name for each in found.requests} == {"a", "c"}
    assert found.counts == {"trace/left_out_rows": 1}


# sizes


@pytest.mark.parametrize("container", ["gzip", "zstd"])
def test_a_small_file_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
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
def test_the_limit_on_unpacked_bytes_holds_for_all_files_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    monkeypatch.setattr(trace, "RATIO_FROM", 1 << 20)
    rows = "".join(f"{json.dumps(row)}\n" for row in block_rows(2)) + "\n" * (1 << 16)
    for number in range(num_files):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    if num_files == 3:
        assert len(load(tmp_path).requests) == 6
        return
    with pytest.raises(TraceError, match=r"jsonl\.gz unpacks to more than 1 MiB"):
        load(tmp_path)


def test_a_folder_of_shards_is_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rows = events(*((n, stored(n, n + 1, n - 1 if n else None)) for n in range(12)))
    for n, row in enumerate(rows):
        write_lines(tmp_path / f"events.{n}.jsonl", [row])
    (found,) = load(tmp_path).requests
    assert found.prompt_len + found.output_len == 12 * 64


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the folder holds no files"):
        load(tmp_path)


@pytest.mark.parametrize("odd", [{"in": None}, {"in": 0}, {"in": "x"}, {"t": -1}, {"out": 1.5}])
def test_an_odd_request_of_a_session_is_left_out(tmp_path: Path, odd: Row) -> None:
    turns = [asked(7.5 * n, [*range(n + 2)]) for n in range(4)]
    found = load_rows(tmp_path, [weka("a", [*turns[:2], turns[2] | odd, turns[3]])])
    assert [each.prompt_len for each in found.requests] == [128, 192, 320]
    assert [each.parent_id for each in found.requests] == [None, 0, 1]
    assert found.counts == {"trace/left_out_rows": 1}
    assert any("line 1, request 2)" in note for note in found.notes)


def test_chats_of_two_models_or_salts_share_nothing(tmp_path: Path) -> None:
    told: list[Row] = [{}, {"model": "b"}, {"cache_salt": "s"}, {}]
    rows = [chat(created=n, response="ok", **more) for n, more in enumerate(told)]
    names = [each.namespace for each in load_rows(tmp_path, rows).requests]
    assert names == ["", "tenant-1", "tenant-2", ""]


def test_the_object_that_an_api_returned_is_the_answer(tmp_path: Path) -> None:
    returned = {"choices": [{"message": {"content": "one two"}}], "usage": {"prompt_tokens": 5}}
    (found,) = load_rows(tmp_path, [chat(response=returned)]).requests
    assert found.output_len == 2


def test_a_log_without_its_text_has_the_lengths_of_its_usage(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 500, "completion_tokens": 7}
    empty = [{"role": "user", "content": None}]
    rows = [{"created": 1, "usage": usage}, {"created": 2, "usage": usage, "messages": empty}]
    found = load_rows(tmp_path, rows)
    assert [(each.prompt_len, each.output_len) for each in found.requests] == [(500, 7)] * 2
    assert found.counts == {}


def test_messages_of_aiperf_have_times_in_ms(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * n, "text_input": "hello", "output_length": 4} for n in (1, 3)]
    found = load_rows(tmp_path, rows)
    assert span_s(found) == 2
    assert [each.output_len for each in found.requests] == [4, 4]
    assert "times read in ms, as the rows name no unit (workload.time_unit)" in found.notes
