"""Traces in the format of the Mooncake FAST'25 release (github.com/kvcache-ai/Mooncake).

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`
(one id for each 512 tokens of the prompt, the last one for what is left). An optional `namespace`
separates tenants. The token at offset o of block b has the id 512 b + o.
"""

from collections.abc import Sequence
from pathlib import Path

from hicache.config import TraceTokens
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, cut_runs
from hicache.workload.trace import Record, TraceError, integer, number, read_records, text
from hicache.workload.turns import INT32_IDS, Turn, to_requests

BLOCK_TOKENS = 512
LEAST_SHARED_BLOCKS = 2  # one common block is a common system prompt, not a common conversation


def load_mooncake(path: Path, *, tokens: TraceTokens, think_cap_s: float) -> list[Request]:
    """Requests of the trace in order of arrival. O(blocks).

    The parent of a request is the latest earlier one whose full blocks, at least two, all prefix
    its own. The trace knows no time of completion, so the think time of closed arrivals is the
    time between the two arrivals, at most `think_cap_s`: an upper bound.

    Raises:
        TraceError: with file and line number, for a line that cannot be understood.
    """
    rows = [_Row(record, f"{path}, line {line}") for line, record in read_records(path)]
    if not rows:
        raise TraceError(f"{path}: wanted a request on each line, the file has none")
    rows.sort(key=lambda row: row.arrival_ns)
    think_cap_ns = round(think_cap_s * 1e9)
    turns: list[Turn] = []
    for index, (row, parent) in enumerate(zip(rows, _parents(rows), strict=True)):
        think_ns = 0
        if parent is not None:
            think_ns = min(row.arrival_ns - rows[parent].arrival_ns, think_cap_ns)
        turns.append(
            Turn(
                arrival_ns=row.arrival_ns,
                prompt=row.prompt(),
                full_len=row.full_blocks * BLOCK_TOKENS,
                prompt_len=row.input_len,
                output_len=row.output_len,
                session=index if parent is None else turns[parent].session,
                parent=parent,
                continues=parent,
                think_ns=think_ns,
                namespace=row.namespace,
            )
        )
    last_block = max(max(row.blocks) for row in rows)
    return to_requests(turns, first_fresh=(last_block + 1) * BLOCK_TOKENS, tokens=tokens)


class _Row:
    """One checked line."""

    __slots__ = ("arrival_ns", "blocks", "full_blocks", "input_len", "namespace", "output_len")

    def __init__(self, record: Record, where: str) -> None:
        self.arrival_ns = round(number(record, "timestamp", where=where) * 1e6)
        self.input_len = integer(record, "input_length", least=1, where=where)
        self.output_len = integer(record, "output_length", least=1, where=where)
        self.namespace = text(record, "namespace", where=where)
        self.full_blocks = self.input_len // BLOCK_TOKENS
        self.blocks = _block_ids(record, where)
        wanted = -(-self.input_len // BLOCK_TOKENS)
        if len(self.blocks) != wanted:
            raise TraceError(
                f"{where}: {self.input_len} prompt tokens are {wanted} blocks of {BLOCK_TOKENS}, "
                f"got {len(self.blocks)} hash_ids"
            )

    def prompt(self) -> Runs:
        """The ids of the prompt, the last block cut to the prompt's length."""
        runs: Runs = []
        first = last = self.blocks[0]  # blocks [first, last] are the run so far
        for block in self.blocks[1:]:
            if block != last + 1:
                append_run(runs, first * BLOCK_TOKENS, (last + 1 - first) * BLOCK_TOKENS)
                first = block
            last = block
        append_run(runs, first * BLOCK_TOKENS, (last + 1 - first) * BLOCK_TOKENS)
        return cut_runs(runs, 0, self.input_len)


def _block_ids(record: Record, where: str) -> list[int]:
    blocks = record.get("hash_ids")
    if not isinstance(blocks, list):
        raise TraceError(f"{where}: hash_ids must be a list of block ids, got {blocks!r}")
    for block in blocks:
        if type(block) is not int or not 0 <= block < INT32_IDS // BLOCK_TOKENS:
            raise TraceError(
                f"{where}: a block id must be an integer in [0, {INT32_IDS // BLOCK_TOKENS}), "
                f"got {block!r}"
            )
    return blocks


def _parents(rows: Sequence[_Row]) -> list[int | None]:
    """For each row the latest earlier one whose full blocks all prefix its own."""
    parents: list[int | None] = []
    roots: dict[str, int] = {}  # where the chain of each namespace begins
    latest: dict[int, int] = {}  # by the chained hash of all full blocks
    for index, row in enumerate(rows):
        parent: int | None = None
        chained = roots.setdefault(row.namespace, len(roots))
        for depth, block in enumerate(row.blocks[: row.full_blocks], start=1):
            chained = hash((chained, block))
            if depth >= LEAST_SHARED_BLOCKS and chained in latest:
                candidate = latest[chained]
                if parent is None or candidate > parent:
                    parent = candidate
        parents.append(parent)
        if row.full_blocks >= LEAST_SHARED_BLOCKS:
            latest[chained] = index
    return parents
