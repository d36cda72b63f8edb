"""Rows of lengths, with or without blocks: Mooncake's format and those that follow it, and tables.

A row has `timestamp`, `input_length`, `output_length` (tokens) and `hash_ids`, one id per block of
the prompt, including a last partial block or not. Mooncake's FAST'25 release
(github.com/kvcache-ai/Mooncake) and Dynamo's converter write times in milliseconds, Qwen-Bailian's
traces in seconds. An optional `namespace` separates tenants. `session_id`, or `chat_id` and
`parent_chat_id` (-1 or null for no parent), link the turns of a session. Rows with a `delay` (ms,
aiperf) follow the row before them in their session, and name only what they add to it, unless their
blocks begin with those of that row.

The token at offset o of block b has the id n b + o, with n tokens per block; Mooncake's blocks hold
512 tokens. Tables of lengths (Azure's, BurstGPT's, Vidur's) have no blocks: their prompts share no
tokens, except that a turn of a session repeats the previous prompt and answer.
"""

from msgspec import Struct

from hicache.config import TraceConfig
from hicache.request import Request
from hicache.workload.rows import (
    UNIT_NOTE,
    UNITS_NS,
    Row,
    draw_starts,
    from_first,
    load_rows,
    rows_to_requests,
)
from hicache.workload.trace import (
    Count,
    Name,
    Number,
    Time,
    Tokens,
    Trace,
    TraceError,
    time_ns,
)

BLOCK_TOKENS = 512
# a first time in this range: from 2001 to 2106 in seconds, in 1970 in milliseconds
FIRST_DATE, LAST_DATE = 10**9, 1 << 32
# other names of the fields, in tables; `_ms` at the end of a name is the unit
NAMES = {
    "timestamp": ("time", "arrived_at", "arrival_s"),
    "timestamp_ms": ("time_ms",),
    "input_length": ("contexttokens", "request tokens", "num_prefill_tokens", "in"),
    "output_length": ("generatedtokens", "response tokens", "num_decode_tokens", "out"),
    "session_id": ("session id", "session", "conversation_id"),
}


class LengthRow(Struct):
    input_length: Tokens
    output_length: Count | None = None
    timestamp: Time | None = None
    timestamp_ms: Time | None = None
    delay: Number | None = None  # ms
    hash_ids: list[Name] | None = None
    namespace: str | None = None
    session_id: Name | None = None
    chat_id: Name | None = None
    parent_chat_id: Name | None = None
    request_id: Name | None = None
    parent: Name | None = None
    turn: int | None = None
    type: str | None = None


def load_mooncake(
    trace: Trace,
    config: TraceConfig,
    *,
    block_tokens: int | None = BLOCK_TOKENS,
    default_unit: str = "ms",
    seed: int = 0,
) -> list[Request]:
    """Load rows of lengths as requests in order of arrival, the first at time 0.

    Each row names the blocks of one prompt by ids. `block_tokens` is the number of tokens per
    block; None means that the loader infers it from prompt lengths and numbers of ids. A request
    continues the earlier request that the trace names. If the trace names neither sessions nor
    parents, the loader takes the latest earlier request whose full blocks are a prefix of the new
    prompt. That prefix must have at least two blocks.

    `default_unit` is the unit of times where neither the fields of the rows nor
    `config.time_unit` say one. If no row has a time, sessions start at random: a Poisson process of
    `config.session_rate` per second, drawn with `seed`.

    Raises:
        TraceError: too many rows are odd; the message names the file and the first ones.
    """
    reader = _Reader(config.time_unit, default_unit)
    rows = list(trace.read(LengthRow, reader.row, NAMES if reader.is_table else None))
    if reader.unit is not None:
        trace.remark(UNIT_NOTE.format(reader.unit))
    if not reader.is_table:
        draw_starts(trace, rows, config, seed)
    if any(row.blocks for row in rows):
        return load_rows(trace, rows, config, block_tokens=block_tokens)
    return rows_to_requests(trace, from_first(trace, rows, config), config, block_tokens=1)


class _Reader:
    def __init__(self, unit: str | None, default_unit: str) -> None:
        self.unit: str | None = None  # of the rows whose fields do not say it
        self.is_table = default_unit == "s"
        self._unit, self._default = unit, default_unit
        self._blocks: dict[Name, list[Name]] = {}  # by session: those of its latest row

    def row(self, where: str, record: LengthRow) -> Row:
        session, own = record.session_id, record.chat_id
        if session is None and self.is_table and record.parent_chat_id is None:
            session, own = own, None  # all turns of a conversation have this id
        if record.request_id is not None:
            own = record.request_id
        parent = record.parent if record.parent_chat_id is None else record.parent_chat_id
        blocks = record.hash_ids or []
        earlier = [] if session is None else self._blocks.get(session, [])
        # the last block of a prompt may be partial, and then another one when the turn continues it
        num_full = max(len(earlier) - 1, 1)
        repeats = bool(earlier) and blocks[:num_full] == earlier[:num_full]
        if session is not None:
            self._blocks[session] = blocks
        return Row(
            where=where,
            arrival_ns=self._arrival_ns(where, record),
            delay_ns=round((record.delay or 0) * UNITS_NS["ms"]),
            prompt_len=record.input_length,
            output_len=record.output_length,
            blocks=blocks,
            namespace=record.namespace or "",
            session=session,
            session_name=str(next((each for each in (session, own) if each is not None), "")),
            name=own,
            parent=None if str(parent) == "-1" else parent,
            is_delta=record.delay is not None and not repeats,
        )

    def _arrival_ns(self, where: str, record: LengthRow) -> int | None:
        value, unit = record.timestamp, self._unit
        if record.timestamp_ms is not None:
            value, unit = record.timestamp_ms, "ms"
        elif unit is None and record.chat_id is not None and (record.turn or record.type):
            unit = "s"  # Qwen-Bailian's rows
        if value is None:
            return None
        if unit is None:
            unit = self._default
            if isinstance(value, float) or value.replace(".", "", 1).isdigit():
                is_date = self.unit is None and FIRST_DATE <= float(value) < LAST_DATE
                self.unit = unit
                if unit == "ms" and (is_date or float(value) % 1):
                    told = "looks like seconds since 1970" if is_date else "has a fraction"
                    raise TraceError(
                        f"{where}: timestamp {told}, so it may be seconds or milliseconds: set "
                        f"workload.time_unit to s or ms"
                    )
        return time_ns(value, UNITS_NS[unit])
