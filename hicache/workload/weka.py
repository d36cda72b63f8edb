"""Coding-agent sessions of WEKA's kv-cache-tester (github.com/callanjfox) and of AgentX (aiperf).

A session is a JSON object with `requests`, each with `t` (s from the session's start), `in`, `out`
(tokens), `stop`, `api_time` (s) and `hash_ids`, the blocks of its prompt, which are local to the
session. A packed session replaces `hash_ids` by `keep`, the number of leading ids shared with the
previous request of its stream, and `new`, the other ids as a flat list of (first, count) ranges. An
entry of type `subagent` holds the requests of a sub-agent. The source is a folder with one file per
session, or a file of JSON lines. A session with an unreadable request is left out as a whole.

Each sub-agent becomes a session: its first request waits for the request that spawned it, and the
first request of the spawning session after all its answers waits for the last of these. These
traces do not show sharing between sessions (a common system prompt).
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from hicache.clock import to_ns
from hicache.config import TraceConfig
from hicache.request import Request
from hicache.workload.rows import complete_answer, starts_ns
from hicache.workload.runs import Runs, append_run, cut_runs, extend_runs, is_prefix, runs_len
from hicache.workload.trace import (
    BlockTokens,
    Count,
    Name,
    Number,
    OddRow,
    Seconds,
    Tokens,
    Trace,
    TraceError,
    told,
)
from hicache.workload.turns import Call, Turn, predecessors, to_requests

BLOCK_TOKENS = 64
LEAST_SHARED_BLOCKS = 2
SIGNATURE_REQUESTS = 3
PLAIN_IDS = 1 << 24  # a session with other block ids gets numbers in order of appearance
BlockId = Annotated[int, Meta(ge=0, lt=PLAIN_IDS)]


class Entry(Struct):
    t: Seconds
    type: str | None = None
    num_in: Tokens | None = field(name="in", default=None)
    num_out: Count | None = field(name="out", default=None)
    stop: str | None = None
    api_time: Seconds | None = None  # null if it was not recorded
    duration_ms: Number | None = None
    hash_ids: list[Name] | None = None
    keep: Count | None = None
    new: list[BlockId] | None = None
    requests: list["Entry"] | None = None


class Session(Struct):
    requests: list[Entry]
    id: Name | None = None
    block_size: BlockTokens = BLOCK_TOKENS
    hash_id_scope: str = "local"


def load_weka(trace: Trace, config: TraceConfig, *, seed: int) -> list[Request]:
    """Load recorded coding-agent sessions as requests in order of arrival.

    `trace` is a file or a folder in the format of WEKA's kv-cache-tester or of AgentX. The sessions
    have no recorded start times, so `seed` draws the order and the start times. Sessions start as a
    Poisson process of `config.session_rate` per second. Within a session the recorded times are
    kept, but pauses are cut to `config.think_cap_s` seconds. A pause is a time in which no request
    of the session or its sub-agents runs. Of sessions that begin with the same requests, at the
    same times and with the same blocks, the longest is kept.

    Raises:
        TraceError: too many sessions are odd; the message names the file and the first ones.
    """
    mend = partial(_without_odd, trace)
    found = _without_copies(trace, list(trace.read(Session, _read_session, mend=mend)))
    trace.check()
    if not any(each.sent for each in found):
        raise TraceError(f"{trace.path}: no requests")
    reader = _Reader(trace, to_ns(config.think_cap_s))
    for session, start_ns in zip(
        found, starts_ns(len(found), config.session_rate, seed), strict=True
    ):
        reader.add_session(session, start_ns)
    return to_requests(reader.turns, first_fresh=reader.first_free, tokens=config.tokens)


class _Sent(NamedTuple):
    call: Call
    entry: Entry
    blocks: Runs


class _Session(NamedTuple):
    where: str
    name: Name | None
    block_tokens: int
    sent: list[_Sent]
    spawners: dict[Hashable, Hashable]  # by stream: the stream that started it


def _without_odd(trace: Trace, where: str, session: object) -> object:
    """Return the JSON value of a session without the requests that do not fit the schema.

    A session whose requests depend on those before them (`keep`) stays as it is.
    """
    entries = session.get("requests") if isinstance(session, dict) else None
    if not isinstance(session, dict) or not isinstance(entries, list):
        return session
    if any(isinstance(each, dict) and "keep" in each for each in entries):
        return session
    kept = []
    trace.num_rows += len(entries)
    for place, entry in enumerate(entries):
        here = f"{where}, request {place}"
        try:
            inner = _without_odd(trace, here, entry)
            fits = msgspec.convert(inner, Entry)
            if fits.type != "subagent" and (fits.num_in is None or fits.hash_ids is None):
                raise OddRow("a request needs in and hash_ids")
        except (msgspec.ValidationError, OddRow) as error:
            trace.leave_out(here, told(error))
        else:
            kept.append(inner)
    return {**session, "requests": kept}


def _read_session(where: str, record: Session) -> _Session:
    if record.hash_id_scope != "local":
        raise OddRow("hash_id_scope must be local")
    spawners: dict[Hashable, Hashable] = {}
    stream = _Stream(spawners, _numbers(record.requests))
    sent = sorted(stream.read(record.requests, 0.0, where), key=lambda each: each.call.start_ns)
    return _Session(where, record.id, record.block_size, sent, spawners)


def _numbers(requests: Sequence[Entry]) -> dict[Name, int] | None:
    # None if the ids of the session are small integers, which need no other numbers
    pending, lists = list(requests), list[list[Name]]()
    while pending:
        entry = pending.pop()
        pending += entry.requests or []
        lists += [entry.hash_ids] if entry.hash_ids else []
    if all(map(_is_plain, lists)):
        return None
    found: dict[Name, int] = {}
    for ids in lists:
        for block in ids:
            found.setdefault(block, len(found))
    return found


def _is_plain(ids: list[Name]) -> bool:
    array = np.array(ids)
    return array.dtype.kind == "i" and bool(array.min() >= 0 and array.max() < PLAIN_IDS)


class _Stream:
    def __init__(self, spawners: dict[Hashable, Hashable], numbers: dict[Name, int] | None) -> None:
        self._spawners, self._numbers = spawners, numbers

    def read(self, entries: Sequence[Entry], origin_s: float, where: str) -> Iterator[_Sent]:
        blocks: Runs = []
        now_s = origin_s
        for place, entry in enumerate(entries):
            here = f"{where}, request {place}"
            at_s = origin_s + entry.t
            if entry.type == "subagent":
                inner = entry.requests or []
                self._spawners[here] = where
                yield from self.read(inner, _origin_s(entry, at_s), here)
                continue
            if entry.num_in is None:
                raise OddRow(f"request {place}: in must be an integer of at least 1")
            now_s = max(now_s, at_s)
            blocks = self._blocks(entry, blocks, place)
            entry.hash_ids = entry.new = None  # as runs they take less memory
            start_ns = to_ns(now_s)
            yield _Sent(Call(where, start_ns, start_ns + to_ns(entry.api_time or 0)), entry, blocks)

    def _blocks(self, entry: Entry, previous: Runs, place: int) -> Runs:
        if entry.keep is None:
            if entry.hash_ids is None:
                raise OddRow(f"request {place}: hash_ids must be a list of block ids")
            ids = entry.hash_ids
            if self._numbers is not None:
                ids = [self._numbers[block] for block in ids]
            return _ranges(np.array(ids, np.int64))
        new = entry.new
        if new is None or len(new) % 2:
            raise OddRow(f"request {place}: new must be a flat list of (first, count) pairs")
        if entry.keep > runs_len(previous):
            raise OddRow(
                f"request {place}: keep is {entry.keep}, but the previous request has only "
                f"{runs_len(previous)} blocks"
            )
        blocks = cut_runs(previous, 0, entry.keep)
        extend_runs(blocks, zip(new[::2], new[1::2], strict=True))
        return blocks


def _ranges(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Runs:
    begins = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 2) != 1)
    counts = np.diff(begins, append=len(ids))
    return list(zip(ids[begins].tolist(), counts.tolist(), strict=True))


def _without_copies(trace: Trace, sessions: Sequence[_Session]) -> list[_Session]:
    # the same recording may be there twice, once shorter: all its requests begin a longer one
    begins: set[int] = set()  # hashes of the beginnings of the sessions kept
    kept: dict[int, _Session] = {}
    for index, session in sorted(enumerate(sessions), key=lambda each: -len(each[1].sent)):
        own = [each for each in session.sent if each.call.session == session.where]
        # a few equal requests may also be chance, unless the session has the same name
        is_short = len(own) < SIGNATURE_REQUESTS
        named, plain = _beginnings(own, session.name), _beginnings(own, None)
        if own and (not is_short or session.name is not None):
            if (named if is_short else plain)[-1] in begins:
                continue
            begins.update(named if session.name is not None else (), plain)
        kept[index] = session
    if len(kept) < len(sessions):
        trace.remark(
            f"{len(sessions) - len(kept):,} of {len(sessions):,} sessions left out: another one "
            f"begins with the same requests, times and blocks, and is as long or longer"
        )
    return [kept[index] for index in sorted(kept)]


def _beginnings(sent: Sequence[_Sent], name: Name | None) -> list[int]:
    begun = hash((name,))
    return [
        begun := hash((begun, each.call.start_ns, each.entry.num_in, tuple(each.blocks)))
        for each in sent
    ]


class _Reader:
    def __init__(self, trace: Trace, think_cap_ns: int) -> None:
        self.turns: list[Turn] = []
        self.first_free = 0
        self._trace, self._think_cap_ns = trace, think_cap_ns
        # of the session that is added
        self._base = 0  # first token id
        self._block_tokens = BLOCK_TOKENS

    def add_session(self, session: _Session, start_ns: int) -> None:
        self._block_tokens = session.block_tokens
        self._base = self.first_free
        calls = [each.call for each in session.sent]
        first = len(self.turns)
        streams: dict[Hashable, list[int]] = {}  # turns by stream
        left_out_ns = answered_ns = 0
        for each, waits in zip(session.sent, predecessors(calls, session.spawners), strict=True):
            call = each.call
            left_out_ns += max(call.start_ns - answered_ns - self._think_cap_ns, 0)
            answered_ns = max(answered_ns, call.end_ns)
            turn = self._turn(each, streams.setdefault(call.session, []))
            if session.name is not None:
                inner = str(call.session).removeprefix(session.where).replace(", request ", "/")
                turn.session_name = f"{session.name}{inner}"
            turn.arrival_ns = start_ns + call.start_ns - left_out_ns
            turn.waits_for = [first + index for index in waits]
            if waits:
                think_ns = call.start_ns - max(calls[index].end_ns for index in waits)
                turn.think_ns = min(max(think_ns, 0), self._think_cap_ns)
            streams[call.session].append(len(self.turns))
            self.turns.append(turn)

    def _turn(self, sent: _Sent, earlier: list[int]) -> Turn:
        entry = sent.entry
        assert entry.num_in is not None
        if not entry.num_out:
            complete_answer(self._trace, str(sent.call.session))
        prompt = self._token_runs(sent.blocks, entry.num_in)
        return Turn(
            arrival_ns=0,
            prompt=prompt,
            full_len=runs_len(prompt) // self._block_tokens * self._block_tokens,
            prompt_len=entry.num_in,
            output_len=entry.num_out or 1,
            session=earlier[0] if earlier else len(self.turns),
            continues=self._continued(earlier, prompt),
            stop_reason=entry.stop or "",
        )

    def _continued(self, earlier: list[int], prompt: Runs) -> int | None:
        for index in reversed(earlier):
            turn = self.turns[index]
            if turn.full_len >= LEAST_SHARED_BLOCKS * self._block_tokens and is_prefix(
                cut_runs(turn.prompt, 0, turn.full_len), prompt
            ):
                return index
        return None

    def _token_runs(self, blocks: Runs, prompt_len: int) -> Runs:
        tokens: Runs = []
        for block, count in blocks:
            first = self._base + block * self._block_tokens
            append_run(tokens, first, count * self._block_tokens)
            self.first_free = max(self.first_free, first + count * self._block_tokens)
        return cut_runs(tokens, 0, prompt_len)


def _origin_s(agent: Entry, at_s: float) -> float:
    # The origin of the times in a sub-agent's requests. In AgentX corpora this is the session's
    # start, as for the entry's own `t`. In kv-cache-tester it is the spawn, and the entry's `t` is
    # the sub-agent's end: in 42 of the 44 entries that have a duration, in two thirds of its
    # traces, `t - duration_ms` is at most 1.1 s after the answer that spawned the sub-agent.
    begins_s = min((each.t for each in agent.requests or ()), default=at_s)
    if begins_s >= at_s / 2:
        return 0.0
    return max(at_s - (agent.duration_ms or 0) / 1e3, 0.0)
