"""Requests from logs of serving systems: Dynamo, LMCache, and the KV events of vLLM and SGLang.

All three name the blocks of a prompt by hashes of the prefix up to their end, and hold no text. The
field names are those of ai-dynamo 1.6.1, lmcache 0.5.6, vllm 0.33.0 and sglang 0.5.23.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hicache.clock import SECOND_NS
from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.rows import Name, Row, load_rows
from hicache.workload.trace import (
    TraceError,
    integer,
    name_of,
    names_of,
    number,
    part,
    read_lines,
    read_records,
    text,
)

DYNAMO_SCHEMA = "dynamo.request.trace.v1"
MS = 10**6
PREFILL_TOKENS_PER_S = 1000  # blocks of one request that arrive more slowly are decoding
LONGEST_PAUSE_NS = 60 * SECOND_NS  # longest pause between two blocks of one request


def load_dynamo(path: Path, config: WorkloadConfig) -> list[Request]:
    """Load a request trace of NVIDIA Dynamo (`DYN_REQUEST_TRACE=1`) as requests.

    The loader uses the `request_end` records, which need a `replay` part. A session with a
    `parent_session_id` is a sub-agent of that session. The recorded times determine which request
    started the sub-agent, and which request waits for the sub-agent's last answer.

    Raises:
        TraceError: a line is malformed; the message names the file and the line.
    """
    return load_rows(path, _dynamo_rows(path), config)


def load_lmcache(path: Path, config: WorkloadConfig) -> list[Request]:
    """Load LMCache's log of cache lookups (`--lookup-hash-log-dir`) as requests.

    The log does not record answers, so every answer gets a length of `config.answer_tokens` tokens.

    Raises:
        TraceError: a line is malformed; the message names the file and the line.
    """
    return load_rows(path, _lmcache_rows(path, config.answer_tokens), config)


def load_kv_events(path: Path, config: WorkloadConfig) -> list[Request]:
    """Load a recording of the KV events of vLLM or SGLang as requests.

    Each line of the file is one batch of events: the time in seconds, and the list of events.
    Events name stored blocks, but not requests. So the loader groups blocks into one request if
    each block continues the one before it within a minute. Prompts that were fully cached appear in
    no event, and so in no request.

    Raises:
        TraceError: a line is malformed; the message names the file and the line.
    """
    return load_rows(path, _event_rows(path, config.answer_tokens), config)


def _dynamo_rows(path: Path) -> Iterator[Row]:
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        if "event" in record:  # the format of its file sink
            record = part(record, "event", where=where)
        if record.get("event_type") != "request_end":  # other records describe payloads and tools
            continue
        if record.get("schema") != DYNAMO_SCHEMA:
            raise TraceError(f"{where}: schema must be {DYNAMO_SCHEMA}, got {record.get('schema')}")
        request = part(record, "request", where=where)
        replay = part(request, "replay", where=where)
        agent = part(record, "agent_context", where=where) if "agent_context" in record else {}
        begin_ms = number(request, "request_received_ms", where=where)
        end_ms = number(record, "event_time_unix_ms", where=where, default=begin_ms)
        yield Row(
            where=where,
            arrival_ns=round(begin_ms * MS),
            answer_ns=max(round((end_ms - begin_ms) * MS), 0),
            prompt_len=integer(replay, "input_length", least=1, where=where),
            # a request canceled before its first token still ran
            output_len=max(integer(request, "output_tokens", least=0, where=where), 1),
            blocks=names_of(replay, "input_sequence_hashes", where=where),
            block_tokens=integer(replay, "trace_block_size", least=1, where=where),
            namespace=text(request, "model", where=where),
            session=name_of(agent, "session_id", where=where),
            spawner=name_of(agent, "parent_session_id", where=where),
        )


def _lmcache_rows(path: Path, output_len: int) -> Iterator[Row]:
    seen: set[Name] = set()
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        request = name_of(record, "request_id", where=where)
        if request in seen:  # an engine repeats the lookup while a request waits
            continue
        if request not in (None, ""):
            seen.add(request)
        yield Row(
            where=where,
            arrival_ns=round(number(record, "timestamp", where=where) * SECOND_NS),
            prompt_len=integer(record, "seq_len", least=1, where=where),
            output_len=output_len,
            blocks=names_of(record, "chunk_hashes", where=where),
            block_tokens=integer(record, "chunk_size", least=1, where=where),
            namespace=text(record, "model_name", where=where),
        )


class _Stored(NamedTuple):
    parent: Name | None
    blocks: list[Name]
    block_tokens: int
    session: Name | None


@dataclass(slots=True, kw_only=True)
class _Growing:
    # a request that may still get blocks; a prompt that was fully cached appears in no event
    row: Row
    blocks: list[Name]
    grown_ns: int
    num_answer: int = 0  # the last `num_answer` of `blocks` belong to the answer

    def takes(self, stored: _Stored, now_ns: int) -> bool:
        passed_ns = now_ns - self.grown_ns
        num_new = len(stored.blocks)
        # once the answer has begun, an event with several blocks belongs to the next turn
        if passed_ns > LONGEST_PAUSE_NS or (self.num_answer and num_new > 1):
            return False
        num_prefilled = PREFILL_TOKENS_PER_S * passed_ns / SECOND_NS / stored.block_tokens
        # to the prompt while blocks come faster than decoding, then to the answer
        if self.num_answer or num_new <= num_prefilled:
            self.num_answer += num_new
        self.blocks += stored.blocks
        self.grown_ns = now_ns
        return True

    def finished(self, output_len: int) -> Row:
        assert self.row.block_tokens is not None
        num_prompt = len(self.blocks) - self.num_answer
        self.row.blocks = self.blocks[:num_prompt]
        self.row.prompt_len = num_prompt * self.row.block_tokens
        self.row.output_len = self.num_answer * self.row.block_tokens or output_len
        return self.row


def _event_rows(path: Path, output_len: int) -> Iterator[Row]:
    before: dict[Name, Name | None] = {}  # by block: the block before it
    growing: dict[Name, _Growing] = {}  # by last block of the request
    for line, batch in read_lines(path):
        where = f"{path}, line {line}"
        now_ns, events = _batch(batch, where)
        for stored in _stores(events, where):
            before.update(zip(stored.blocks, [stored.parent, *stored.blocks], strict=False))
            request = None if stored.parent is None else growing.pop(stored.parent, None)
            if request is None or not request.takes(stored, now_ns):
                if request is not None:
                    yield request.finished(output_len)
                row = Row(
                    where=where,
                    arrival_ns=now_ns,
                    prompt_len=1,
                    output_len=1,
                    block_tokens=stored.block_tokens,
                    session=stored.session,
                )
                blocks = [*_path(stored.parent, before), *stored.blocks]
                request = _Growing(row=row, blocks=blocks, grown_ns=now_ns)
            replaced = growing.get(stored.blocks[-1])
            if replaced is not None:  # the same blocks were evicted and are stored again
                yield replaced.finished(output_len)
            growing[stored.blocks[-1]] = request
    for request in growing.values():
        yield request.finished(output_len)


def _batch(batch: object, where: str) -> tuple[int, Sequence[object]]:
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise TraceError(f"{where}: expected a batch of KV events, [time, [event, ...]]")
    return round(number({"time": batch[0]}, "time", where=where) * SECOND_NS), batch[1]


def _stores(events: Iterable[object], where: str) -> Iterator[_Stored]:
    for event in events:
        if not isinstance(event, dict) or "type" not in event:
            raise TraceError(f"{where}: a KV event must be an object with a type")
        if event["type"] != "BlockStored" or event.get("medium") not in (None, "GPU"):
            continue
        if event.get("group_idx"):  # other layers of the same tokens
            continue
        blocks = names_of(event, "block_hashes", where=where)
        if blocks:
            yield _Stored(
                name_of(event, "parent_block_hash", where=where),
                blocks,
                integer(event, "block_size", least=1, where=where),
                name_of(event, "session_id", where=where),
            )


def _path(block: Name | None, before: dict[Name, Name | None]) -> list[Name]:
    found: list[Name] = []
    while block is not None:
        found.append(block)
        block = before.get(block)
    return found[::-1]
