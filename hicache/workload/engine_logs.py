"""Requests from logs of serving systems: Dynamo, LMCache, and the KV events of vLLM and SGLang.

All three name the blocks of a prompt by hashes of the prefix up to their end, and hold no text. The
field names are those of ai-dynamo 1.6.1, lmcache 0.5.6, vllm 0.33.0 and sglang 0.5.23. The engines
send a KV event as an object, or as an array of its type and its fields in the order of
`STORED_FIELDS`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from hicache.clock import SECOND_NS
from hicache.config import TraceConfig
from hicache.request import Request
from hicache.workload.rows import Row, load_rows
from hicache.workload.trace import (
    BlockTokens,
    Count,
    Name,
    Number,
    OddRow,
    Tokens,
    Trace,
    TraceError,
    time_ns,
)

DYNAMO_SCHEMA = "dynamo.request.trace.v1"
MS = 10**6
PREFILL_TOKENS_PER_S = 1000  # blocks of one request that arrive more slowly are decoding
LONGEST_PAUSE_NS = 60 * SECOND_NS  # longest pause between two blocks of one request
STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)


class Replay(Struct):
    trace_block_size: BlockTokens
    input_length: Tokens
    input_sequence_hashes: list[Name]


class DynamoRequest(Struct):
    request_received_ms: Number
    replay: Replay | None = None
    output_tokens: Count | None = None
    model: str | None = None


class Agent(Struct):
    session_id: Name | None = None
    parent_session_id: Name | None = None


class DynamoRecord(Struct):
    event: "DynamoRecord | None" = None  # the format of the file sink
    event_type: str | None = None
    schema: str | None = None
    event_time_unix_ms: Number | None = None
    request: DynamoRequest | None = None
    agent_context: Agent | None = None


class Lookup(Struct):
    timestamp: Number  # s
    seq_len: Tokens
    chunk_hashes: list[Name]
    chunk_size: BlockTokens
    request_id: Name | None = None
    model_name: str | None = None


class Stored(Struct):
    """A stored event: blocks of one prompt or answer, after the block `parent_block_hash`."""

    block_hashes: list[Name]
    block_size: BlockTokens
    parent_block_hash: Name | None = None
    lora_id: Name | None = None
    lora_name: str | None = None
    medium: str | None = None
    locality: str | None = None
    extra_keys: list[Any] | None = None
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: Name | None = None


def load_dynamo(trace: Trace, config: TraceConfig) -> list[Request]:
    """Load a request trace of NVIDIA Dynamo (`DYN_REQUEST_TRACE=1`) as requests.

    The loader uses the `request_end` records, which need a `replay` part. A session with a
    `parent_session_id` is a sub-agent of that session. The recorded times determine which request
    started the sub-agent, and which request waits for the sub-agent's last answer.

    Raises:
        TraceError: too many rows are odd; the message names the file and the first ones.
    """
    return load_rows(trace, trace.read(DynamoRecord, _dynamo_row), config)


def load_lmcache(trace: Trace, config: TraceConfig) -> list[Request]:
    """Load LMCache's log of cache lookups (`--lookup-hash-log-dir`) as requests.

    The log does not record answers, so every answer gets a length of `config.answer_tokens` tokens.

    Raises:
        TraceError: too many rows are odd; the message names the file and the first ones.
    """
    seen: set[Name] = set()

    def row(where: str, record: Lookup) -> Row | None:
        if record.request_id in seen:  # an engine repeats the lookup while a request waits
            return None
        if record.request_id not in (None, ""):
            seen.add(record.request_id)
        return Row(
            where=where,
            arrival_ns=time_ns(record.timestamp, SECOND_NS),
            prompt_len=record.seq_len,
            output_len=None,
            blocks=record.chunk_hashes,
            block_tokens=record.chunk_size,
            namespace=record.model_name or "",
        )

    return load_rows(trace, trace.read(Lookup, row), config)


def load_kv_events(trace: Trace, config: TraceConfig) -> list[Request]:
    """Load a recording of the KV events of vLLM or SGLang as requests.

    Each line of the file is one batch of events: the time in seconds, and the list of events.
    Events name stored blocks, but not requests. So the loader groups blocks into one request if
    each block continues the one before it within a minute. Prompts that were fully cached appear in
    no event, and so in no request. Of a hybrid model, the events of the full-attention group count.
    Events with other salts or LoRA adapters belong to other namespaces.

    Raises:
        TraceError: too many rows are odd, the blocks form a cycle, or no group is known to hold
            full attention. The message names the file and the line.
    """
    stores = [each for batch in trace.read(object, _batch) for each in batch]
    trace.check()
    requests = _Grown(trace, config.answer_tokens)
    return load_rows(trace, requests.rows(_of_full_attention(trace, stores)), config)


def _dynamo_row(where: str, record: DynamoRecord) -> Row | None:
    record = record.event or record
    if record.event_type != "request_end":  # other records describe payloads and tools
        return None
    if record.schema != DYNAMO_SCHEMA:
        raise OddRow(f"schema must be {DYNAMO_SCHEMA}")
    request, agent = record.request, record.agent_context or Agent()
    if request is None or request.replay is None:
        raise OddRow("the record has no request.replay, which names the blocks of its prompt")
    begin_ns = time_ns(request.request_received_ms, MS)
    ended_ms = record.event_time_unix_ms
    return Row(
        where=where,
        arrival_ns=begin_ns,
        answer_ns=0 if ended_ms is None else max(time_ns(ended_ms, MS) - begin_ns, 0),
        prompt_len=request.replay.input_length,
        output_len=request.output_tokens,
        blocks=request.replay.input_sequence_hashes,
        block_tokens=request.replay.trace_block_size,
        namespace=request.model or "",
        session=agent.session_id,
        session_name="" if agent.session_id is None else str(agent.session_id),
        spawner=agent.parent_session_id,
    )


class _Store(NamedTuple):
    where: str
    time_ns: int
    event: Stored


def _batch(where: str, batch: object) -> list[_Store]:
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise OddRow("expected a batch of KV events, [time, [event, ...]]")
    now_ns = time_ns(batch[0], SECOND_NS, "time")
    return [_Store(where, now_ns, event) for event in _stores(batch[1])]


def _stores(events: Iterable[object]) -> Iterator[Stored]:
    for event in events:
        named = _named(event)
        if named.get("type") != "BlockStored":
            continue
        stored = msgspec.convert(named, Stored)
        places = (stored.medium or "GPU").upper(), (stored.locality or "LOCAL").upper()
        if stored.block_hashes and places == ("GPU", "LOCAL"):
            yield stored


def _named(event: object) -> Mapping[str, object]:
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return event
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        raise OddRow("a KV event must be an object with a type, or an array that begins with it")
    plain = [each for each in event[1:] if not isinstance(each, dict)]
    found: dict[str, object] = {"type": event[0], **dict(zip(STORED_FIELDS, plain, strict=False))}
    for each in event[1:]:  # sglang appends a map with the salt
        found |= each if isinstance(each, dict) else {}
    return found


def _adapter(event: Stored) -> str:
    return str(event.lora_name or event.lora_id or "")


def _of_full_attention(trace: Trace, stores: list[_Store]) -> list[_Store]:
    # the number of a group says nothing about its kind
    kinds = {each.event.group_idx or 0: each.event.kv_cache_spec_kind for each in stores}
    if len(kinds) < 2 and not any(kinds.values()):
        return stores
    full = [group for group, kind in kinds.items() if kind and ("full" in kind or "mla" in kind)]
    full = [group for group in full if "sliding" not in (kinds[group] or "")]
    if not full:
        said = ", ".join(f"{group}: {kind or 'no kind'}" for group, kind in sorted(kinds.items()))
        raise TraceError(
            f"{trace.path}: no group of layers is known to have full attention "
            f"(kv_cache_spec_kind by group: {said})"
        )
    if len(kinds) > 1:
        trace.remark(f"KV events of group {full[0]} ({kinds[full[0]]}) of {len(kinds)} groups")
    return [each for each in stores if (each.event.group_idx or 0) == full[0]]


Key = tuple[str, Name]  # namespace, and hash of a block: hashes may be equal in two namespaces


@dataclass(slots=True, kw_only=True)
class _Growing:
    # a request that may still get blocks; a prompt that was fully cached appears in no event
    row: Row
    blocks: list[Name]
    grown_ns: int
    num_answer: int = 0  # the last `num_answer` of `blocks` belong to the answer

    def takes(self, store: _Store) -> bool:
        passed_ns = store.time_ns - self.grown_ns
        num_new = len(store.event.block_hashes)
        # once the answer has begun, an event with several blocks belongs to the next turn
        if passed_ns > LONGEST_PAUSE_NS or (self.num_answer and num_new > 1):
            return False
        num_prefilled = PREFILL_TOKENS_PER_S * passed_ns / SECOND_NS / store.event.block_size
        is_slow = num_new <= num_prefilled
        # vLLM, which names the kinds of groups, stores the blocks of an answer one by one
        if is_slow and num_new > 1 and store.event.kv_cache_spec_kind is not None:
            return False
        # to the prompt while blocks come faster than decoding, then to the answer
        if self.num_answer or is_slow:
            self.num_answer += num_new
        self.blocks += store.event.block_hashes
        self.grown_ns = store.time_ns
        return True

    def finished(self, output_len: int) -> Row:
        assert self.row.block_tokens is not None
        num_prompt = len(self.blocks) - self.num_answer
        self.row.blocks = self.blocks[:num_prompt]
        self.row.prompt_len = num_prompt * self.row.block_tokens
        self.row.output_len = self.num_answer * self.row.block_tokens or output_len
        return self.row


class _Grown:
    """Requests that grow block by block while a recording of KV events is read."""

    def __init__(self, trace: Trace, output_len: int) -> None:
        self._trace, self._output_len = trace, output_len
        self._before: dict[Key, Name | None] = {}  # by block: the block before it
        self._followed: set[Name] = set()  # blocks that others follow
        # by adapter and block: the namespace that stored it last
        self._latest: dict[tuple[str, Name | None], str] = {}

    def rows(self, stores: Iterable[_Store]) -> Iterator[Row]:
        growing: dict[Key, _Growing] = {}  # by last block of the request
        for store in stores:
            event, space = store.event, self._namespace(store.event)
            self._chain(space, store)
            parent = event.parent_block_hash
            request = None if parent is None else growing.pop((space, parent), None)
            if request is None or not request.takes(store):
                if request is not None:
                    yield request.finished(self._output_len)
                request = self._begun(space, store)
            last = (space, event.block_hashes[-1])
            replaced = growing.get(last)
            if replaced is not None:  # the same blocks were evicted and are stored again
                yield replaced.finished(self._output_len)
            growing[last] = request
        for request in growing.values():
            yield request.finished(self._output_len)

    def _namespace(self, event: Stored) -> str:
        adapter, parent = _adapter(event), event.parent_block_hash
        if not event.cache_salt and (adapter, parent) in self._latest:
            return self._latest[adapter, parent]  # keys stand beside the first block of a prompt
        keys = event.extra_keys[0] if event.extra_keys and parent is None else None
        return " ".join(str(each) for each in (adapter, event.cache_salt or keys) if each)

    def _chain(self, space: str, store: _Store) -> None:
        event = store.event
        parents = [event.parent_block_hash, *event.block_hashes]
        for block, parent in zip(event.block_hashes, parents, strict=False):
            key, above = (space, block), parent
            # neither a link that is known nor a block that no other one follows closes a cycle
            known = key in self._before
            is_safe = self._before[key] == parent if known else block not in self._followed
            while not is_safe and above is not None and above != block:
                self._trace.spend(1)
                above = self._before.get((space, above))
            if above == block:
                raise TraceError(f"{store.where}: a block is stored below itself or its own child")
            self._before[key] = parent
            self._latest[_adapter(event), block] = space
            if parent is not None:
                self._followed.add(parent)

    def _begun(self, space: str, store: _Store) -> _Growing:
        event, path = store.event, list[Name]()
        block = event.parent_block_hash
        while block is not None:
            path.append(block)
            block = self._before.get((space, block))
        self._trace.spend(len(path))
        row = Row(
            where=store.where,
            arrival_ns=store.time_ns,
            prompt_len=1,
            output_len=1,
            block_tokens=event.block_size,
            namespace=space,
            session=event.session_id,
            session_name="" if event.session_id is None else str(event.session_id),
        )
        blocks = [*path[::-1], *event.block_hashes]
        return _Growing(row=row, blocks=blocks, grown_ns=store.time_ns)
