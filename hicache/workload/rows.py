"""Requests of a trace as its lines tell them, and who continues whom.

A line names the blocks of its prompt, whatever their size and however they are called, or nothing
but lengths. It may name its session, or itself and its parent; else a request continues the latest
earlier one whose full blocks all prefix its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.clock import SECOND_NS
from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, cut_runs, is_prefix, runs_len
from hicache.workload.trace import TraceError
from hicache.workload.turns import INT32_IDS, Turn, to_requests

LEAST_SHARED_BLOCKS = 2  # one common block is a common system prompt, not a common conversation
LATEST_S = 1 << 32  # since 1970, in 2106: milliseconds that are taken for seconds come later
LONGEST_S = 10 * 365 * 24 * 3600  # no trace lasts so long, unless a time of it has another unit
Name = int | str


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of a trace, checked.

    `where` opens error messages. `blocks` names the blocks of the prompt; tokens of the prompt
    after them are new. `session` names a conversation whose requests follow one another in time;
    `name` and `parent` name this request and the one that it continues.
    """

    where: str
    arrival_ns: int
    prompt_len: int
    output_len: int
    blocks: Sequence[Name] = ()
    namespace: str = ""
    session: Name | None = None
    name: Name | None = None
    parent: Name | None = None


def from_first(path: Path, rows: Iterable[Row]) -> list[Row]:
    """The rows, at least one, in times from that of the first.

    Raises:
        TraceError: there is none, or one comes at a time that must be told in another unit.
    """
    found = list(rows)
    if not found:
        raise TraceError(f"{path}: expected one request per line, but the file has none")
    first = min(found, key=lambda row: row.arrival_ns)
    last = max(found, key=lambda row: row.arrival_ns)
    if last.arrival_ns > LATEST_S * SECOND_NS:
        raise TraceError(f"{last.where}: its time is after the year 2106: check the unit")
    if last.arrival_ns - first.arrival_ns > LONGEST_S * SECOND_NS:
        raise TraceError(
            f"{last.where}: it arrives more than ten years after {first.where}: check the "
            "unit of both times"
        )
    first_ns = first.arrival_ns
    for row in found:
        row.arrival_ns -= first_ns
    return found


def rows_to_requests(
    rows: Sequence[Row], config: WorkloadConfig, *, block_tokens: int
) -> list[Request]:
    """Requests in order of arrival. O(blocks).

    A trace knows no time of completion, so the think time of closed arrivals is the time between
    the two arrivals, at most `config.think_cap_s`: an upper bound. A prompt is no parent whose
    full blocks end within `config.system_tokens`: everybody begins with them.

    Raises:
        TraceError: a line names a parent that is not before it, or there are too many tokens.
    """
    rows = sorted(rows, key=lambda row: row.arrival_ns)
    numbers = _block_numbers(rows, block_tokens)
    if any(row.session is not None or row.name is not None for row in rows):
        parents = _told(rows)
    else:
        parents = _inferred(rows, numbers, block_tokens, config.system_tokens)
    fresh = (1 + max((block for each in numbers for block in each), default=-1)) * block_tokens
    think_cap_ns = round(config.think_cap_s * 1e9)
    turns: list[Turn] = []
    for index, (row, blocks, parent) in enumerate(zip(rows, numbers, parents, strict=True)):
        before = None if parent is None else turns[parent]
        prompt = _token_runs(blocks, block_tokens, row.prompt_len)
        full_len = row.prompt_len // block_tokens * block_tokens
        if not blocks:  # a turn repeats the one before and its answer, and adds to it
            prompt = [] if before is None else cut_runs(before.prompt, 0, row.prompt_len)
            full_len = row.prompt_len
        added = row.prompt_len - runs_len(prompt)
        append_run(prompt, fresh, added)
        fresh += added
        turn = Turn(
            arrival_ns=row.arrival_ns,
            prompt=prompt,
            full_len=full_len,
            prompt_len=row.prompt_len,
            output_len=row.output_len,
            session=index,
            namespace=row.namespace,
        )
        if before is not None:
            turn.parent = parent
            turn.session = before.session
            turn.think_ns = min(row.arrival_ns - before.arrival_ns, think_cap_ns)
            if is_prefix(cut_runs(before.prompt, 0, before.full_len), prompt):
                turn.continues = parent
        turns.append(turn)
    return to_requests(turns, first_fresh=fresh, tokens=config.tokens)


def _block_numbers(rows: Sequence[Row], block_tokens: int) -> list[list[int]]:
    """Blocks as small integers: as the trace names them if these are some, else as they come."""
    most = INT32_IDS // block_tokens
    if all(type(block) is int and 0 <= block < most for row in rows for block in row.blocks):
        return [[int(block) for block in row.blocks] for row in rows]
    numbers: dict[Name, int] = {}
    return [[numbers.setdefault(block, len(numbers)) for block in row.blocks] for row in rows]


def _token_runs(blocks: Sequence[int], block_tokens: int, prompt_len: int) -> Runs:
    """The ids of the blocks, the last one cut to the prompt's length."""
    runs: Runs = []
    if not blocks:
        return runs
    first = last = blocks[0]  # blocks [first, last] are the run so far
    for block in blocks[1:]:
        if block != last + 1:
            append_run(runs, first * block_tokens, (last + 1 - first) * block_tokens)
            first = block
        last = block
    append_run(runs, first * block_tokens, (last + 1 - first) * block_tokens)
    return cut_runs(runs, 0, prompt_len)


def _inferred(
    rows: Sequence[Row], numbers: Sequence[Sequence[int]], block_tokens: int, system_tokens: int
) -> list[int | None]:
    """For each row the latest earlier one whose full blocks all prefix its own."""
    parents: list[int | None] = []
    roots: dict[str, int] = {}  # where the chain of each namespace begins
    latest: dict[int, int] = {}  # by the chained hash of all full blocks
    least_blocks = max(LEAST_SHARED_BLOCKS, system_tokens // block_tokens + 1)
    for index, (row, blocks) in enumerate(zip(rows, numbers, strict=True)):
        parent: int | None = None
        full_blocks = min(row.prompt_len // block_tokens, len(blocks))
        chained = roots.setdefault(row.namespace, len(roots))
        for depth, block in enumerate(blocks[:full_blocks], start=1):
            chained = hash((chained, block))
            if depth >= least_blocks and chained in latest:
                candidate = latest[chained]
                if parent is None or candidate > parent:
                    parent = candidate
        parents.append(parent)
        if full_blocks >= least_blocks:
            latest[chained] = index
    return parents


def _told(rows: Sequence[Row]) -> list[int | None]:
    """For each row the one it names, or else the one before it in its session."""
    parents: list[int | None] = []
    named: dict[Name, int] = {}
    latest: dict[Name, int] = {}
    for index, row in enumerate(rows):
        parent = None if row.session is None else latest.get(row.session)
        if row.parent is not None:
            parent = named.get(row.parent)
            if parent is None:
                raise TraceError(f"{row.where}: no earlier request has the id {row.parent!r}")
        if row.name is not None:
            if row.name in named:
                raise TraceError(f"{row.where}: two requests have the id {row.name!r}")
            named[row.name] = index
        if row.session is not None:
            latest[row.session] = index
        parents.append(parent)
    return parents
