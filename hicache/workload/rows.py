"""Requests as the rows of a trace describe them, and the links between them.

A row names the blocks of its prompt, of any size and with any names, or gives only lengths. It may
name its session, or itself and its parent. If no row does, a request continues the latest earlier
one whose full blocks are all a prefix of its own. But if many different requests continue the same
blocks, these are a system prompt or a document, and not an earlier turn.

The rules for odd rows are here, for every form: a request without answer tokens runs with one, a
request whose parent is not in the trace begins a session, and a row that contradicts the others is
left out.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hicache.clock import SECOND_NS, to_ns
from hicache.config import TraceConfig
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, cut_runs, extend_runs, is_prefix, runs_len
from hicache.workload.trace import Name, Trace, TraceError
from hicache.workload.turns import INT32_IDS, Call, Turn, predecessors, to_requests

LEAST_SHARED_BLOCKS = 2  # one shared block is a shared system prompt, not a shared conversation
MOST_BRANCHES = 16  # continuations of one prompt; Mooncake's conversation trace has at most 9
LATEST_S = 1 << 32  # seconds since 1970, in 2106: later times must be milliseconds
LONGEST_S = 10 * 365 * 24 * 3600  # a longer trace must have times in another unit
SIZES = tuple(1 << power for power in range(16))  # block sizes that the loader tries
UNIT_NOTE = "times read in {}, as the rows name no unit (workload.time_unit)"
UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
# a trace with more requests per second, or fewer, probably has times in another unit
MOST_PER_S = 100.0
LEAST_PER_S = 1 / 600
LEAST_TIMED = 10  # requests from which the rate is judged


@dataclass(slots=True, kw_only=True)
class Row:
    """One row of a trace, parsed and checked.

    `where` names the file and the line for messages. `arrival_ns` is None if the row gives the
    delay after the answer before it (`delay_ns`). `output_len` is None or 0 if the row has no
    answer. `blocks` lists the names of the prompt's token blocks; prompt tokens after the last
    block occur in no other prompt. `block_tokens` is the number of tokens per block, None if
    unknown. `session` names the conversation; its requests follow one another in time. `name`
    identifies this request, and `parent` the request that this one continues. `spawner` names the
    session that started this session as a sub-agent. `session_name` is the user's name for the
    session. `answer_ns` is the duration of the answer in ns, 0 if unknown. `is_delta` is True if
    the row describes only what its prompt adds to the turn before it and its answer. `is_repeated`
    is False if later prompts do not repeat the answer as it was generated.
    """

    where: str
    arrival_ns: int | None
    prompt_len: int
    output_len: int | None
    delay_ns: int = 0
    answer_ns: int = 0
    blocks: Sequence[Name] = ()
    block_tokens: int | None = None
    namespace: str = ""
    session: Name | None = None
    session_name: str = ""
    name: Name | None = None
    parent: Name | None = None
    spawner: Name | None = None
    is_delta: bool = False
    is_repeated: bool = True


def from_first(trace: Trace, rows: Iterable[Row], config: TraceConfig) -> list[Row]:
    """Return `rows` in order of arrival, with the first arrival as time 0, and their answers.

    A row whose time is far from those of the others is left out.

    Raises:
        TraceError: there are no rows, or too many are odd.
    """
    timed = complete_answers(trace, _with_times(trace, rows), config.answer_tokens)
    found = sorted(((row.arrival_ns or 0, row) for row in timed), key=lambda each: each[0])
    kept = []
    for at_ns, row in found:
        middle_ns, middle = found[(len(found) - 1) // 2]
        if at_ns > LATEST_S * SECOND_NS:
            trace.leave_out(
                row.where, "its time is after the year 2106: check the unit (workload.time_unit)"
            )
        elif abs(at_ns - middle_ns) > LONGEST_S * SECOND_NS:
            side = "before" if at_ns < middle_ns else "after"
            told = f"it arrives more than ten years {side} {middle.where}: check the unit"
            trace.leave_out(row.where, told)
        else:
            kept.append((at_ns, row))
    trace.check()
    if not kept:
        raise TraceError(f"{trace.path}: no requests")
    for at_ns, row in kept:
        row.arrival_ns = at_ns - kept[0][0]
    return [row for _, row in kept]


def _with_times(trace: Trace, rows: Iterable[Row]) -> list[Row]:
    found = []
    latest: dict[Name, int] = {}
    for row in rows:
        if row.arrival_ns is None:
            before_ns = None if row.session is None else latest.get(row.session)
            if before_ns is None:
                trace.leave_out(row.where, "it has no time, and no turn before it in its session")
                continue
            row.arrival_ns = before_ns + row.delay_ns
        if row.session is not None:
            latest[row.session] = row.arrival_ns
        found.append(row)
    return found


def starts_ns(num_sessions: int, rate: float, seed: int) -> list[int]:
    """Return the start of each session in ns: a Poisson process of `rate` per second, shuffled."""
    rng = np.random.default_rng(seed)
    starts_s = np.cumsum(rng.exponential(1 / rate, num_sessions))
    places = rng.permutation(num_sessions)
    return [to_ns(starts_s[place].item()) for place in places]


def draw_starts(trace: Trace, rows: Sequence[Row], config: TraceConfig, seed: int) -> None:
    """Give the first row of each session a random start, if no row has a time."""
    if not rows or any(row.arrival_ns is not None for row in rows):
        return
    firsts: dict[Hashable, Row] = {}
    for index, row in enumerate(rows):
        firsts.setdefault((index,) if row.session is None else row.session, row)
    drawn = starts_ns(len(firsts), config.session_rate, seed)
    for row, start_ns in zip(firsts.values(), drawn, strict=True):
        row.arrival_ns = start_ns
    trace.remark(
        f"the trace has no times: sessions start at random, {config.session_rate:g} per second "
        f"(workload.session_rate)"
    )


def complete_answers(trace: Trace, rows: list[Row], answer_tokens: int) -> list[Row]:
    """Give each request without answer tokens one, and return `rows`.

    A request that was cut off before its first token still ran. If no row has an answer, the trace
    does not record them, and each answer gets `answer_tokens` tokens.
    """
    lacking = [row for row in rows if not row.output_len]
    if lacking and len(lacking) == len(rows):
        trace.remark(
            f"the trace records no answers: each has {answer_tokens:,} tokens "
            f"(workload.answer_tokens)"
        )
    for row in lacking:
        row.output_len = answer_tokens if len(lacking) == len(rows) else 1
        if len(lacking) < len(rows):
            complete_answer(trace, row.where)
    return rows


def complete_answer(trace: Trace, where: str) -> None:
    trace.complete(where, "no answer tokens, so the request runs with one")


def judge_span(path: Path, requests: Sequence[Request]) -> str | None:
    """Return a warning if the span of `requests` suggests that their times have another unit."""
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / SECOND_NS
    num = len(requests)
    if num < LEAST_TIMED or not span_s or LEAST_PER_S <= num / span_s <= MOST_PER_S:
        return None
    return (
        f"{path}: {num:,} requests arrive within {span_s:,.3g} s: if the times have "
        f"another unit, set workload.time_unit"
    )


def load_rows(
    trace: Trace, rows: Iterable[Row], config: TraceConfig, *, block_tokens: int | None = None
) -> list[Request]:
    """Convert parsed trace rows to requests in order of arrival, the first at time 0.

    `rows` may be in any order. `block_tokens` is the number of tokens per block. If it is None, the
    rows give it, or else it is inferred: the only power of two for which the prompt lengths agree
    with the numbers of block ids. The rows either all list the partial last block of a prompt, or
    all leave it out. A row that contradicts the block size is left out.

    Raises:
        TraceError: no block size agrees with most rows, or too many rows are odd.
    """
    found = from_first(trace, rows, config)
    told = next((row.block_tokens for row in found if row.block_tokens is not None), None)
    size, found = _of_one_size(trace, found, block_tokens or told)
    if block_tokens is None and told is None:
        trace.remark(f"blocks of {size:,} tokens, inferred from the rows (workload.block_tokens)")
    return rows_to_requests(trace, found, config, block_tokens=size)


def _of_one_size(
    trace: Trace, rows: Sequence[Row], block_tokens: int | None
) -> tuple[int, list[Row]]:
    named = [row for row in rows if row.blocks]
    if not named:
        return block_tokens or 1, list(rows)
    prompt_lens = np.array([row.prompt_len for row in named])
    num_blocks = np.array([len(row.blocks) for row in named])
    sizes = SIZES if block_tokens is None else (block_tokens,)
    suits = {
        (size, counts_partial): (prompt_lens + counts_partial * (size - 1)) // size == num_blocks
        for counts_partial in (1, 0)
        for size in sizes
    }
    most = max(suited.sum() for suited in suits.values())
    best = [form for form, suited in suits.items() if suited.sum() == most]
    alike = [size for size, counts_partial in best if counts_partial == best[0][1]]
    if len(alike) > 1 or (block_tokens is None and 2 * most <= len(named)):
        longest = max(rows, key=lambda row: row.prompt_len)
        raise TraceError(
            f"{trace.path}: no single block size fits every line ({longest.where} has "
            f"{longest.prompt_len} tokens in {len(longest.blocks)} blocks): set "
            f"workload.block_tokens"
        )
    size, counts_partial = best[0]
    odd: set[str] = set()
    for row, suited in zip(named, suits[best[0]].tolist(), strict=True):
        if row.block_tokens not in (None, size):
            why = f"its blocks have {row.block_tokens} tokens, those of other rows have {size}"
        elif not suited:
            wanted = (row.prompt_len + counts_partial * (size - 1)) // size
            why = (
                f"{row.prompt_len} prompt tokens need {wanted} blocks of {size} tokens, got "
                f"{len(row.blocks)}"
            )
        else:
            continue
        odd.add(row.where)
        trace.leave_out(row.where, why)
    trace.check()
    unnamed = sum(row.prompt_len >= size for row in rows if not row.blocks)
    if unnamed:
        trace.remark(f"{unnamed:,} of {len(rows):,} prompts name no blocks, and share no tokens")
    return size, [row for row in rows if row.where not in odd]


def rows_to_requests(
    trace: Trace, rows: Sequence[Row], config: TraceConfig, *, block_tokens: int
) -> list[Request]:
    """Convert parsed trace rows to requests; `rows` are in order of arrival.

    `block_tokens` is the number of tokens per block. If the trace does not name the previous turn
    of a request, the function finds it by the shared prefix. A prompt is no previous turn if more
    than `MOST_BRANCHES` (16) different blocks follow it in later prompts: it is then a system
    prompt or a document. The think time of a request is the time since the previous answer. If the
    trace has no answer times, it is the time since the previous arrival. It is at most
    `config.think_cap_s` seconds.

    Raises:
        TraceError: too many rows are odd, or there are too many tokens.
    """
    numbers = _block_numbers(rows, block_tokens)
    if any(row.session is not None or row.name is not None for row in rows):
        rows, numbers, waits = _recorded(trace, rows, numbers)
    else:
        waits = _inferred(rows, numbers, block_tokens)
        if any(numbers):
            trace.remark("sessions inferred: a turn continues the prompt whose blocks it repeats")
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
        prompt, full_len, fresh = _prompt(row, blocks, before, block_tokens, fresh)
        if before is not None and (row.is_delta or not blocks):
            trace.spend(len(prompt))
        turn = Turn(
            arrival_ns=row.arrival_ns or 0,
            prompt=prompt,
            full_len=full_len,
            prompt_len=runs_len(prompt),
            output_len=row.output_len or 1,
            session=session,
            session_name=row.session_name if session == index else turns[session].session_name,
            waits_for=awaited,
            namespace=row.namespace,
        )
        if awaited:
            answered_ns = max(
                (rows[each].arrival_ns or 0) + rows[each].answer_ns for each in awaited
            )
            turn.think_ns = min(max(turn.arrival_ns - answered_ns, 0), think_cap_ns)
        if (
            before is not None
            and rows[awaited[0]].is_repeated
            and is_prefix(cut_runs(before.prompt, 0, before.full_len), prompt)
        ):
            turn.continues = awaited[0]
        turns.append(turn)
    return to_requests(turns, first_fresh=fresh, tokens=config.tokens)


def _prompt(
    row: Row, blocks: Sequence[int], before: Turn | None, block_tokens: int, fresh: int
) -> tuple[Runs, int, int]:
    # the tokens of a prompt, the length that its blocks or earlier turns fix, and the next fresh id
    prompt_len, full_len = row.prompt_len, row.prompt_len // block_tokens * block_tokens
    prompt = _token_runs(blocks, block_tokens, prompt_len)
    if row.is_delta and before is not None:
        earlier = list(before.prompt)
        append_run(earlier, fresh, before.output_len)
        fresh += before.output_len
        prompt_len = full_len = prompt_len + runs_len(earlier)
        extend_runs(earlier, prompt)
        prompt = earlier
    elif not blocks:  # a turn repeats the previous one and its answer, and appends to them
        prompt = [] if before is None else cut_runs(before.prompt, 0, prompt_len)
        full_len = prompt_len
    added = prompt_len - runs_len(prompt)
    append_run(prompt, fresh, added)
    return prompt, full_len, fresh + added


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
    rows: Sequence[Row], numbers: Sequence[Sequence[int]], block_tokens: int
) -> list[list[int]]:
    parents: list[tuple[int, int] | None] = []  # (index of the row, chained hash of its blocks)
    roots: dict[str, int] = {}  # by namespace, the start of its hash chain
    latest: dict[int, int] = {}  # by chained hash of all full blocks: the latest row
    # by the same hash: the blocks that follow it in its children
    branches: dict[int, set[int | None]] = {}
    for index, (row, blocks) in enumerate(zip(rows, numbers, strict=True)):
        parent: tuple[int, int] | None = None
        following: int | None = None
        full_blocks = min(row.prompt_len // block_tokens, len(blocks))
        chained = roots.setdefault(row.namespace, len(roots))
        for depth, block in enumerate(blocks[:full_blocks], start=1):
            chained = hash((chained, block))
            candidate = latest.get(chained) if depth >= LEAST_SHARED_BLOCKS else None
            if candidate is not None and (parent is None or candidate > parent[0]):
                parent = candidate, chained
                following = blocks[depth] if depth < len(blocks) else None
        if parent is not None:
            branches.setdefault(parent[1], set()).add(following)
        parents.append(parent)
        if full_blocks >= LEAST_SHARED_BLOCKS:
            latest[chained] = index
    return [
        [] if parent is None or len(branches[parent[1]]) > MOST_BRANCHES else [parent[0]]
        for parent in parents
    ]


def _recorded(
    trace: Trace, rows: Sequence[Row], numbers: Sequence[list[int]]
) -> tuple[list[Row], list[list[int]], list[list[int]]]:
    # the rows whose names are their own, the numbers of their blocks, and the rows they wait for
    names: set[Name] = set()
    kept = []
    for index, row in enumerate(rows):
        if row.name in names:
            trace.leave_out(row.where, "an earlier request has the same id")
            continue
        if row.name is not None:
            names.add(row.name)
        kept.append(index)
    trace.check()
    numbers = [numbers[index] for index in kept]
    rows = [rows[index] for index in kept]
    waits = _waits(rows)
    place = {row.name: index for index, row in enumerate(rows) if row.name is not None}
    for index, row in enumerate(rows):
        if row.parent is None:
            continue
        parent = place.get(row.parent, index)
        if parent < index:
            waits[index][:1] = [parent]
        else:
            trace.outside += 1
    if trace.outside:
        trace.remark(
            f"{trace.outside:,} of {len(rows):,} requests continue a request that is not before "
            f"them in the trace: each begins a session"
        )
    return rows, numbers, waits


def _waits(rows: Sequence[Row]) -> list[list[int]]:
    sessions: list[Hashable] = [
        (index,) if row.session is None else row.session for index, row in enumerate(rows)
    ]
    calls = [
        Call(session, row.arrival_ns or 0, (row.arrival_ns or 0) + row.answer_ns)
        for session, row in zip(sessions, rows, strict=True)
    ]
    spawners = {
        session: row.spawner
        for session, row in zip(sessions, rows, strict=True)
        if row.spawner not in (None, session)
    }
    return predecessors(calls, spawners)
