"""Coding-agent sessions of WEKA's kv-cache-tester (github.com/callanjfox) and of AgentX (aiperf).

A session is a JSON object with `requests`, each with `t` (s from the session's start), `in`, `out`
(tokens), `stop`, `api_time` (s) and `hash_ids`, the blocks of its prompt, which are local to the
session. An entry of type `subagent` holds the requests of a sub-agent. The source is a folder with
one file per session, or a file of JSON lines.

Each sub-agent becomes a session: its first request waits for the request that spawned it, and the
first request of the spawning session after all its answers waits for the last of these. These
traces do not show sharing between sessions (a common system prompt).
"""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hicache.clock import to_ns
from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, cut_runs, extend_runs, is_prefix, runs_len
from hicache.workload.trace import Record, TraceError, integer, number, text
from hicache.workload.turns import Call, Turn, predecessors, to_requests
from hicache.workload.weka_sessions import BLOCK_TOKENS, nested, read_sessions

LEAST_SHARED_BLOCKS = 2


def load_weka(path: Path, config: WorkloadConfig, *, seed: int) -> list[Request]:
    """Load recorded coding-agent sessions as requests in order of arrival.

    `path` is a file or a folder in the format of WEKA's kv-cache-tester or of AgentX. The sessions
    have no recorded start times, so `seed` draws the order and the start times. Sessions start as a
    Poisson process of `config.session_rate` per second. Within a session the recorded times are
    kept, but pauses are cut to `config.think_cap_s` seconds. A pause is a time in which no request
    of the session or its sub-agents runs.

    Raises:
        TraceError: a session is malformed; the message names the file and the line.
    """
    sessions = list(read_sessions(path))
    if not sessions:
        raise TraceError(f"{path}: expected sessions, but the file has none")

    rng = np.random.default_rng(seed)
    starts_s = np.cumsum(rng.exponential(1 / config.session_rate, len(sessions)))
    places = rng.permutation(len(sessions))
    reader = _Reader(to_ns(config.think_cap_s))
    for (where, session), place in zip(sessions, places, strict=True):
        reader.add_session(session, to_ns(starts_s[place].item()), where)
    return to_requests(reader.turns, first_fresh=reader.first_free, tokens=config.tokens)


class _Sent(NamedTuple):
    call: Call
    record: Record
    where: str
    prompt: Runs


class _Reader:
    def __init__(self, think_cap_ns: int) -> None:
        self.turns: list[Turn] = []
        self.first_free = 0
        self._think_cap_ns = think_cap_ns
        # state of the session being read
        self._base = 0  # first token id of the session
        self._block_tokens = BLOCK_TOKENS
        self._spawners: dict[Hashable, Hashable] = {}  # by stream: the stream that started it

    def add_session(self, session: Record, start_ns: int, where: str) -> None:
        if session.get("hash_id_scope", "local") != "local":
            raise TraceError(
                f"{where}: hash_id_scope must be local, got {session['hash_id_scope']!r}"
            )
        self._block_tokens = BLOCK_TOKENS
        if "block_size" in session:
            self._block_tokens = integer(session, "block_size", least=1, where=where)
        self._base = self.first_free
        self._spawners = {}
        sent = sorted(self._stream(session, 0.0, where), key=lambda each: each.call.start_ns)
        calls = [each.call for each in sent]
        first = len(self.turns)
        streams: dict[Hashable, list[int]] = {}  # turns by stream
        left_out_ns = answered_ns = 0
        for each, waits in zip(sent, predecessors(calls, self._spawners), strict=True):
            call = each.call
            left_out_ns += max(call.start_ns - answered_ns - self._think_cap_ns, 0)
            answered_ns = max(answered_ns, call.end_ns)
            turn = self._turn(each, streams.setdefault(call.session, []))
            turn.arrival_ns = start_ns + call.start_ns - left_out_ns
            turn.waits_for = [first + index for index in waits]
            if waits:
                think_ns = call.start_ns - max(calls[index].end_ns for index in waits)
                turn.think_ns = min(max(think_ns, 0), self._think_cap_ns)
            streams[call.session].append(len(self.turns))
            self.turns.append(turn)

    def _stream(self, stream: Record, origin_s: float, where: str) -> Iterator[_Sent]:
        blocks: Runs = []
        now_s = origin_s
        for place, record in enumerate(nested(stream, where)):
            here = f"{where}, request {place}"
            at_s = origin_s + number(record, "t", where=here)
            if record.get("type") == "subagent":
                self._spawners[here] = where
                yield from self._stream(record, _origin_s(record, at_s, here), here)
                continue
            now_s = max(now_s, at_s)
            # null if it was not recorded
            api_s = number(record, "api_time", where=here) if record.get("api_time") else 0.0
            blocks = _block_runs(record, blocks, here)
            prompt = self._token_runs(blocks, integer(record, "in", least=1, where=here), here)
            call = Call(where, to_ns(now_s), to_ns(now_s) + to_ns(api_s))
            yield _Sent(call, record, here, prompt)

    def _turn(self, sent: _Sent, earlier: list[int]) -> Turn:
        record, where = sent.record, sent.where
        return Turn(
            arrival_ns=0,
            prompt=sent.prompt,
            full_len=runs_len(sent.prompt) // self._block_tokens * self._block_tokens,
            prompt_len=integer(record, "in", least=1, where=where),
            # a request cut off before its first token still ran
            output_len=max(integer(record, "out", least=0, where=where), 1),
            session=earlier[0] if earlier else len(self.turns),
            continues=self._continued(earlier, sent.prompt),
            stop_reason=text(record, "stop", where=where),
        )

    def _continued(self, earlier: list[int], prompt: Runs) -> int | None:
        for index in reversed(earlier):
            turn = self.turns[index]
            if turn.full_len >= LEAST_SHARED_BLOCKS * self._block_tokens and is_prefix(
                cut_runs(turn.prompt, 0, turn.full_len), prompt
            ):
                return index
        return None

    def _token_runs(self, blocks: Runs, prompt_len: int, where: str) -> Runs:
        tokens: Runs = []
        for block, count in blocks:
            if block < 0:
                raise TraceError(f"{where}: a block id must be at least 0, got {block}")
            first = self._base + block * self._block_tokens
            append_run(tokens, first, count * self._block_tokens)
            self.first_free = max(self.first_free, first + count * self._block_tokens)
        return cut_runs(tokens, 0, prompt_len)


def _origin_s(agent: Record, at_s: float, where: str) -> float:
    # The origin of the times in a sub-agent's requests. In AgentX corpora this is the session's
    # start, as for the entry's own `t`. In kv-cache-tester it is the spawn, and the entry's `t` is
    # the sub-agent's end: in 42 of the 44 entries that have a duration, in two thirds of its
    # traces, `t - duration_ms` is at most 1.1 s after the answer that spawned the sub-agent.
    begins_s = min((number(each, "t", where=where) for each in nested(agent, where)), default=at_s)
    if begins_s >= at_s / 2:
        return 0.0
    duration_s = number(agent, "duration_ms", where=where) / 1e3 if agent.get("duration_ms") else 0
    return max(at_s - duration_s, 0.0)


def _block_runs(record: Record, previous: Runs, where: str) -> Runs:
    keep = integer(record, "keep", least=0, where=where)
    new = record.get("new")
    if not isinstance(new, list) or len(new) % 2 or not all(type(value) is int for value in new):
        raise TraceError(f"{where}: new must be a flat list of (first, count) pairs, got {new!r}")
    if keep > runs_len(previous):
        raise TraceError(
            f"{where}: keep is {keep}, but the previous request has only {runs_len(previous)} "
            "blocks"
        )
    blocks = cut_runs(previous, 0, keep)
    extend_runs(blocks, zip(new[::2], new[1::2], strict=True))
    return blocks
