"""Coding-agent sessions in the format of WEKA's kv-cache-tester (github.com/callanjfox).

A session is a JSON object with `requests`, each with `t` (s from the session's start), `in`, `out`
(tokens), `stop`, `api_time` and `think_time` (s), and the ids of the 64-token blocks of its
prompt, local to the session. An entry of type `subagent` holds a stream of its own. Read are
upstream's folder of sessions, one a file with `hash_ids`, and what `weka_pack` makes of it.

Every stream is a session here; the first request of a sub-agent's has the request that spawned it
as parent. Sharing between sessions (a common system prompt) cannot be seen in this trace.
"""

from pathlib import Path

import numpy as np

from hicache.clock import to_ns
from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, cut_runs, extend_runs, is_prefix, runs_len
from hicache.workload.trace import Record, TraceError, integer, number, read_records, text
from hicache.workload.turns import Turn, to_requests
from hicache.workload.weka_pack import BLOCK_TOKENS, nested, read_raw_sessions

LEAST_SHARED_BLOCKS = 2


def load_weka(path: Path, config: WorkloadConfig, *, seed: int) -> list[Request]:
    """Requests in order of arrival, of a packed file or a folder of raw sessions.

    Sessions have no start time: they begin in an order and at times drawn from `seed`, as a Poisson
    process of `config.session_rate` a second. Within a session times are the trace's, with every
    think time cut to `config.think_cap_s`.

    Raises:
        TraceError: with file and line number, for a session that cannot be understood.
    """
    if path.is_dir():
        sessions = list(read_raw_sessions(path))
    else:
        sessions = [(f"{path}, line {line}", record) for line, record in read_records(path)]
    if not sessions:
        raise TraceError(f"{path}: expected sessions, but the file has none")

    rng = np.random.default_rng(seed)
    starts_s = np.cumsum(rng.exponential(1 / config.session_rate, len(sessions)))
    places = rng.permutation(len(sessions))
    reader = _Reader(config.think_cap_s)
    for (where, session), place in zip(sessions, places, strict=True):
        reader.add_session(session, starts_s[place].item(), where)
    return to_requests(reader.turns, first_fresh=reader.first_free, tokens=config.tokens)


class _Reader:
    """Collects the turns of sessions; `first_free` is the first token id none of them names."""

    def __init__(self, think_cap_s: float) -> None:
        self.turns: list[Turn] = []
        self.first_free = 0
        self._think_cap_s = think_cap_s
        self._base = 0  # first id of the session that is being read

    def add_session(self, session: Record, start_s: float, where: str) -> None:
        """Add all streams of one session, which begins at `start_s`."""
        for name, wanted in (("block_size", BLOCK_TOKENS), ("hash_id_scope", "local")):
            if session.get(name, wanted) != wanted:
                raise TraceError(f"{where}: {name} must be {wanted}, got {session[name]!r}")
        self._base = self.first_free
        self._add_stream(session, start_s, None, 0.0, where)

    def _add_stream(
        self, stream: Record, start_s: float, spawner: int | None, think_s: float, where: str
    ) -> None:
        """`spawner` and `think_s`: whom the first request waits for, and how long after."""
        first = len(self.turns)
        mine: list[int] = []  # turns of this stream
        blocks: Runs = []
        previous_t = now_s = 0.0  # of the request before: in the trace, and with think times cut
        api_s = 0.0  # how long its answer took
        for place, record in enumerate(nested(stream, where)):
            here = f"{where}, request {place}"
            gap_s = max(number(record, "t", where=here) - previous_t, 0.0)
            if record.get("type") == "subagent":
                gap_s = min(gap_s, api_s + self._think_cap_s)
                self._add_stream(
                    record,
                    start_s + now_s + gap_s,
                    mine[-1] if mine else spawner,
                    max(gap_s - api_s, 0.0),
                    here,
                )
                continue
            thought_s = number(record, "think_time", where=here, default=max(gap_s - api_s, 0.0))
            if mine:
                think_s = min(thought_s, self._think_cap_s)
                gap_s = max(gap_s - (thought_s - think_s), 0.0)
            previous_t += max(number(record, "t", where=here) - previous_t, 0.0)
            now_s += gap_s
            api_s = number(record, "api_time", where=here, default=0.0)

            blocks = _block_runs(record, blocks, here)
            prompt_len = integer(record, "in", least=1, where=here)
            prompt = self._token_runs(blocks, prompt_len, here)
            full_len = runs_len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
            self.turns.append(
                Turn(
                    arrival_ns=to_ns(start_s + now_s),
                    prompt=prompt,
                    full_len=full_len,
                    prompt_len=prompt_len,
                    # a request that was cut off before its first token ran all the same
                    output_len=max(integer(record, "out", least=0, where=here), 1),
                    session=first,
                    parent=mine[-1] if mine else spawner,
                    continues=self._continued(mine, prompt),
                    think_ns=to_ns(think_s),
                    stop_reason=text(record, "stop", where=here),
                )
            )
            mine.append(len(self.turns) - 1)

    def _continued(self, earlier: list[int], prompt: Runs) -> int | None:
        """The latest turn of the stream whose full blocks, two at least, all prefix `prompt`."""
        for index in reversed(earlier):
            turn = self.turns[index]
            if turn.full_len >= LEAST_SHARED_BLOCKS * BLOCK_TOKENS and is_prefix(
                cut_runs(turn.prompt, 0, turn.full_len), prompt
            ):
                return index
        return None

    def _token_runs(self, blocks: Runs, prompt_len: int, where: str) -> Runs:
        tokens: Runs = []
        for block, count in blocks:
            if block < 0:
                raise TraceError(f"{where}: a block id must be at least 0, got {block}")
            first = self._base + block * BLOCK_TOKENS
            append_run(tokens, first, count * BLOCK_TOKENS)
            self.first_free = max(self.first_free, first + count * BLOCK_TOKENS)
        return cut_runs(tokens, 0, prompt_len)


def _block_runs(record: Record, previous: Runs, where: str) -> Runs:
    """Runs of block ids: the first `keep` of the previous request's, and the ranges in `new`."""
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
