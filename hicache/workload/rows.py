"""Requests as the lines of a trace describe them, and the links between them.

A line names the blocks of its prompt, of any size and with any names, or gives only lengths. It may
name its session, or itself and its parent. If no line does, a request continues the latest earlier
one whose full blocks are all a prefix of its own. But if many different requests continue the same
blocks, these are a system prompt or a document, and not an earlier turn.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hicache.clock import SECOND_NS
from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, cut_runs, is_prefix, runs_len
from hicache.workload.trace import TraceError
from hicache.workload.turns import INT32_IDS, Call, Turn, predecessors, to_requests

LEAST_SHARED_BLOCKS = 2  # one shared block is a shared system prompt, not a shared conversation
MOST_BRANCHES = 16  # continuations of one prompt; Mooncake's conversation trace has at most 9
LATEST_S = 1 << 32  # seconds since 1970, in 2106: later times must be milliseconds
LONGEST_S = 10 * 365 * 24 * 3600  # a longer trace must have times in another unit
SIZES = tuple(1 << power for power in range(16))  # block sizes that the loader tries
Name = int | str


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of a trace, parsed and checked.

    `where` names the file and the line for error messages. `blocks` lists the names of the prompt's
    token blocks; prompt tokens after the last block occur in no other prompt. `block_tokens` is the
    number of tokens per block, None if unknown. `session` names the conversation; its requests
    follow one another in time. `name` identifies this request, and `parent` the request that this
    one continues. `spawner` names the session that started this session as a sub-agent. `answer_ns`
    is the duration of the answer in ns, 0 if unknown.
    """

    where: str
    arrival_ns: int
    prompt_len: int
    output_len: int
    answer_ns: int = 0
    blocks: Sequence[Name] = ()
    block_tokens: int | None = None
    namespace: str = ""
    session: Name | None = None
    name: Name | None = None
    parent: Name | None = None
    spawner: Name | None = None


def from_first(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Return `rows` in order of arrival, with the first arrival as time 0.

    Raises:
        TraceError: there are no rows, or the unit of a time seems to be wrong.
    """
    found = sorted(rows, key=lambda row: row.arrival_ns)
    if not found:
        raise TraceError(f"{path}: expected one request per line, but the file has none")
    first, last = found[0], found[-1]
    if last.arrival_ns > LATEST_S * SECOND_NS:
        raise TraceError(f"{last.where}: its time is after the year 2106: check the unit")
    if last.arrival_ns - first.arrival_ns > LONGEST_S * SECOND_NS:
        middle_ns = found[(len(found) - 1) // 2].arrival_ns
        odd, side, other = first, "before", last
        if last.arrival_ns - middle_ns > middle_ns - first.arrival_ns:
            odd, side, other = last, "after", first
        raise TraceError(
            f"{odd.where}: it arrives more than ten years {side} {other.where}: check the unit of "
            f"both times"
        )
    first_ns = first.arrival_ns
    for row in found:
        row.arrival_ns -= first_ns
    return found


def load_rows(
    path: Path, rows: Iterable[Row], config: WorkloadConfig, *, block_tokens: int | None = None
) -> list[Request]:
    """Convert parsed trace lines to requests in order of arrival, the first at time 0.

    `rows` may be in any order. `block_tokens` is the number of tokens per block. If it is None, the
    rows give it, or else it is inferred: the only power of two for which the prompt lengths agree
    with the numbers of block ids. The rows either all list the partial last block of a prompt, or
    all leave it out.

    Raises:
        TraceError: no block size agrees with most rows, or one row contradicts the others.
    """
    found = from_first(path, rows)
    for row in found:
        block_tokens = block_tokens or row.block_tokens
        if row.block_tokens not in (None, block_tokens):
            raise TraceError(
                f"{row.where}: its blocks have {row.block_tokens} tokens, those of "
                f"{found[0].where} have {block_tokens}"
            )
    return rows_to_requests(found, config, block_tokens=_block_size(path, found, block_tokens))


def _block_size(path: Path, rows: Sequence[Row], block_tokens: int | None) -> int:
    prompt_lens = np.array([row.prompt_len for row in rows])
    num_blocks = np.array([len(row.blocks) for row in rows])
    sizes = SIZES if block_tokens is None else (block_tokens,)
    suits = {
        (size, counts_partial): (prompt_lens + counts_partial * (size - 1)) // size == num_blocks
        for counts_partial in (1, 0)
        for size in sizes
    }
    most = max(suited.sum() for suited in suits.values())
    best = [form for form, suited in suits.items() if suited.sum() == most]
    alike = [size for size, counts_partial in best if counts_partial == best[0][1]]
    if len(alike) > 1 or (block_tokens is None and 2 * most <= len(rows)):
        longest = max(rows, key=lambda row: row.prompt_len)
        raise TraceError(
            f"{path}: no single block size fits every line ({longest.where} has "
            f"{longest.prompt_len} tokens in {len(longest.blocks)} blocks): set "
            f"workload.block_tokens"
        )
    size, counts_partial = best[0]
    for row, suited in zip(rows, suits[best[0]].tolist(), strict=True):
        if not suited:
            wanted = (row.prompt_len + counts_partial * (size - 1)) // size
            raise TraceError(
                f"{row.where}: {row.prompt_len} prompt tokens need {wanted} blocks of {size} "
                f"tokens, got {len(row.blocks)}"
            )
    return size


def rows_to_requests(
    rows: Sequence[Row], config: WorkloadConfig, *, block_tokens: int
) -> list[Request]:
    """Convert parsed trace lines to requests; `rows` are in order of arrival.

    `block_tokens` is the number of tokens per block. If the trace does not name the previous turn
    of a request, the function finds it by the shared prefix. A prompt is no previous turn if it is
    not longer than `config.system_tokens`. A prompt is also no previous turn if more than
    `MOST_BRANCHES` (16) different blocks follow it in later prompts: it is then a system prompt or
    a document. The think time of a request is the time since the previous answer. If the trace has
    no answer times, it is the time since the previous arrival. It is at most `config.think_cap_s`
    seconds.

    Raises:
        TraceError: a line names a parent that is not before it, or there are too many tokens.
    """
    numbers = _block_numbers(rows, block_tokens)
    if any(row.session is not None or row.name is not None for row in rows):
        waits = _recorded(rows)
    else:
        waits = _inferred(rows, numbers, block_tokens, config.system_tokens)
    fresh = (1 + max((block for each in numbers for block in each), default=-1)) * block_tokens
    think_cap_ns = round(config.think_cap_s * 1e9)
    first_of: dict[Name, int] = {}
    turns: list[Turn] = []
    for index, (row, blocks, awaited) in enumerate(zip(rows, numbers, waits, strict=True)):
        session = index if row.session is None else first_of.setdefault(row.session, index)
        before = turns[awaited[0]] if awaited else None
        if before is not None and row.session is None:
            session = before.session
        elif before is not None and before.session != session:  # it spawned this session
            before = None
        prompt = _token_runs(blocks, block_tokens, row.prompt_len)
        full_len = row.prompt_len // block_tokens * block_tokens
        if not blocks:  # a turn repeats the previous one and its answer, and appends to them
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
            session=session,
            waits_for=awaited,
            namespace=row.namespace,
        )
        if awaited:
            answered_ns = max(rows[each].arrival_ns + rows[each].answer_ns for each in awaited)
            turn.think_ns = min(max(row.arrival_ns - answered_ns, 0), think_cap_ns)
        if before is not None and is_prefix(cut_runs(before.prompt, 0, before.full_len), prompt):
            turn.continues = awaited[0]
        turns.append(turn)
    return to_requests(turns, first_fresh=fresh, tokens=config.tokens)


def _block_numbers(rows: Sequence[Row], block_tokens: int) -> list[list[int]]:
    most = INT32_IDS // block_tokens
    if all(type(block) is int and 0 <= block < most for row in rows for block in row.blocks):
        return [[int(block) for block in row.blocks] for row in rows]
    numbers: dict[Name, int] = {}
    return [[numbers.setdefault(block, len(numbers)) for block in row.blocks] for row in rows]


def _token_runs(blocks: Sequence[int], block_tokens: int, prompt_len: int) -> Runs:
    runs: Runs = []
    for block in blocks:
        append_run(runs, block * block_tokens, block_tokens)
    return cut_runs(runs, 0, prompt_len)


def _inferred(
    rows: Sequence[Row], numbers: Sequence[Sequence[int]], block_tokens: int, system_tokens: int
) -> list[list[int]]:
    parents: list[tuple[int, int] | None] = []  # (index of the row, chained hash of its blocks)
    roots: dict[str, int] = {}  # by namespace, the start of its hash chain
    latest: dict[int, int] = {}  # by chained hash of all full blocks: the latest row
    # by the same hash: the blocks that follow it in its children
    branches: dict[int, set[int | None]] = {}
    least_blocks = max(LEAST_SHARED_BLOCKS, system_tokens // block_tokens + 1)
    for index, (row, blocks) in enumerate(zip(rows, numbers, strict=True)):
        parent: tuple[int, int] | None = None
        following: int | None = None
        full_blocks = min(row.prompt_len // block_tokens, len(blocks))
        chained = roots.setdefault(row.namespace, len(roots))
        for depth, block in enumerate(blocks[:full_blocks], start=1):
            chained = hash((chained, block))
            candidate = latest.get(chained) if depth >= least_blocks else None
            if candidate is not None and (parent is None or candidate > parent[0]):
                parent = candidate, chained
                following = blocks[depth] if depth < len(blocks) else None
        if parent is not None:
            branches.setdefault(parent[1], set()).add(following)
        parents.append(parent)
        if full_blocks >= least_blocks:
            latest[chained] = index
    return [
        [] if parent is None or len(branches[parent[1]]) > MOST_BRANCHES else [parent[0]]
        for parent in parents
    ]


def _recorded(rows: Sequence[Row]) -> list[list[int]]:
    sessions: list[Hashable] = [
        (index,) if row.session is None else row.session for index, row in enumerate(rows)
    ]
    calls = [
        Call(session, row.arrival_ns, row.arrival_ns + row.answer_ns)
        for session, row in zip(sessions, rows, strict=True)
    ]
    spawners = {
        session: row.spawner
        for session, row in zip(sessions, rows, strict=True)
        if row.spawner not in (None, session)
    }
    waits = predecessors(calls, spawners)
    named: dict[Name, int] = {}
    for index, row in enumerate(rows):
        if row.parent is not None:
            if row.parent not in named:
                raise TraceError(f"{row.where}: no earlier request has the id {row.parent!r}")
            waits[index][:1] = [named[row.parent]]
        if row.name is not None:
            if row.name in named:
                raise TraceError(f"{row.where}: two requests have the id {row.name!r}")
            named[row.name] = index
    return waits
