"""Logs of serving systems, each with a fixture that the system's own code wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.config import TraceTokens
from hicache.request import Request
from hicache.workload.trace import TraceError
from tests.workload.infinite_cache import token_hit_rate
from tests.workload.traces import load_requests, session_starts, write_lines

FIXTURES = Path(__file__).parent / "fixtures"


def load(path: Path, tokens: TraceTokens = TraceTokens.literal, **settings: Any) -> list[Request]:
    return load_requests(path, tokens=tokens, **settings)


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


def test_sessions_of_dynamo_start_and_join_sub_agents_by_their_times():
    found = load(FIXTURES / "dynamo.jsonl")
    # main asks, spawns two helpers that ask three times and once, and asks twice more
    assert session_starts(found) == [0, 1, 2, 2, 2, 0, 6, 0]
    assert [r.parent_id for r in found] == [None, 0, 0, 2, 3, 0, None, 5]
    assert {r.id: r.joins for r in found if r.joins} == {5: (1, 4)}
    assert found[5].think_ns == 319 * 10**6  # after the last helper's answer
    assert [r.output_len for r in found] == [40, 24, 24, 24, 24, 32, 16, 8]


def test_an_unlimited_cache_hits_as_much_as_the_worker_of_dynamo():
    requests = [line["event"]["request"] for line in lines("dynamo.jsonl")]
    assert sum(each["cached_tokens"] for each in requests) == 912
    hit_rate = 912 / sum(each["input_tokens"] for each in requests)
    assert token_hit_rate(load(FIXTURES / "dynamo.jsonl"), page=16) == pytest.approx(hit_rate)


def test_records_of_dynamo_need_no_wrapper_and_others_are_left_out(tmp_path):
    bare = [line["event"] for line in lines("dynamo.jsonl")]
    path = write_lines(tmp_path / "bare.jsonl", [{"event_type": "request_payload"}, *bare])
    assert len(load(path)) == len(bare)


def test_each_lookup_of_lmcache_is_read_once():
    found = load(FIXTURES / "lmcache.jsonl", answer_tokens=7)
    assert [r.prompt_len for r in found] == [600, 700, 990, 990, 1060]
    assert [r.output_len for r in found] == [7] * 5
    assert [r.parent_id for r in found] == [None, None, 0, None, 2]
    assert [r.namespace[-3:] for r in found] == ["-8B", "-8B", "-8B", "32B", "-8B"]
    # whole chunks of 64: of the system prompt, of the first prompt, of the third
    assert token_hit_rate(found) == pytest.approx(64 * (200 // 64 + 600 // 64 + 990 // 64) / 4340)


def test_events_of_sglang_become_prompts_and_answers():
    found = load(FIXTURES / "sglang_kv_events.jsonl")
    # a prompt of 264 tokens in two chunks and its answer of 90; one of 364 and 40; a next turn of
    # 454 and 64. Whole blocks of 16 are stored, and at the end of a prompt begins the answer's
    assert [(r.prompt_len, r.output_len) for r in found] == [(256, 96), (352, 48), (448, 64)]
    assert [r.parent_id for r in found] == [None, None, 0]
    assert [r.arrival_ns for r in found] == [0, 10**9, 12 * 10**9]
    assert token_hit_rate(
        load(FIXTURES / "sglang_kv_events.jsonl", TraceTokens.reconstructed), page=16
    ) == (pytest.approx((64 + 352) / (256 + 352 + 448)))


def stored(blocks: list[int], parent: int | None, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent}
    return event | {"token_ids": [], "block_size": 16, "lora_id": None, "medium": "GPU"} | more


FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}


def test_blocks_that_vllm_stores_while_it_decodes_are_the_answer(tmp_path):
    batches = [
        [0.0, [stored([1, 2, 3], None, **FULL)]],
        [0.3, [stored([4], 3, **FULL), stored([4], 3, **WINDOW), stored([4], 3, medium="CPU")]],
        [0.6, [stored([5], 4, **FULL)]],
        [5.0, [stored([6, 7], 5, **FULL)]],  # the next turn
        [5.1, [stored([9], None, session_id="other", **FULL), {"type": "AllBlocksCleared"}]],
        [90.0, [stored([8], 7, **FULL)]],  # no answer takes so long
    ]
    found = load(write_lines(tmp_path / "events.jsonl", batches))
    assert [(r.prompt_len, r.output_len) for r in found] == [(48, 32), (112, 1), (16, 1), (128, 1)]


def test_blocks_of_latent_attention_are_read_like_full_attention(tmp_path):
    latent = {"group_idx": 1, "kv_cache_spec_kind": "mla_attention"}
    batches = [[0.0, [stored([1, 2], None, **latent), stored([9], None, **WINDOW)]]]
    (found,) = load(write_lines(tmp_path / "events.jsonl", batches))
    assert found.prompt_len == 32


def test_blocks_that_are_stored_again_are_another_request(tmp_path):
    removed = {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"}
    batches = [{"ts": t, "events": [stored([1, 2], None), removed]} for t in (0.0, 7.0)]
    found = load(write_lines(tmp_path / "events.jsonl", batches))
    assert [(r.prompt_len, r.arrival_ns) for r in found] == [(32, 0), (32, 7 * 10**9)]


REPLAY = {"trace_block_size": 4, "input_length": 4, "input_sequence_hashes": [7]}
ASKED = {"request_received_ms": 5, "output_tokens": 2, "replay": REPLAY}
ENDED = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": ASKED}
LOOKUP = {"timestamp": 3.5, "chunk_size": 4, "seq_len": 6, "chunk_hashes": ["0xa"]}
BATCH = [0.0, [stored([1], None)]]


def replay(**changes: object) -> dict[str, Any]:
    return ENDED | {"request": ASKED | {"replay": REPLAY | changes}}


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        (ENDED, ENDED | {"schema": "v2"}, "schema must be dynamo.request.trace.v1"),
        (ENDED, ENDED | {"request": 3}, "request must be an object or null, got an integer"),
        (ENDED, replay(trace_block_size=8), "its blocks have 8 tokens, those of other rows have 4"),
        (ENDED, replay(input_length=40), "40 prompt tokens need 10 blocks of 4 tokens, got 1"),
        (LOOKUP, LOOKUP | {"chunk_hashes": None}, "chunk_hashes must be a list, got null"),
        (LOOKUP, LOOKUP | {"seq_len": 0}, "seq_len must be an integer of at least 1"),
        (BATCH, [1.0], r"expected a batch of KV events, \[time"),
        (BATCH, ["x", []], "time must be a number or a date"),
        (BATCH, [1.0, [5]], "a KV event must be an object with a type"),
        (BATCH, [1.0, [stored([2], None, block_size=0)]], "block_size"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path, good, bad, told):
    path = write_lines(tmp_path / "log.jsonl", [good, bad])
    with pytest.raises(TraceError, match=f"line 2: {told}"):
        load(path)
