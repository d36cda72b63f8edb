"""Explains the first request that differs.

Both sides run once more up to that request. After each earlier request they report what they hold
of its prompt. The cause is the request at which these reports begin to differ.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.diff.compare import Driver, Row, open_sides, token_ids
from experiments.diff.engines import Launch
from experiments.diff.protocol import Outcome, Pools, Span
from hicache.request import Request

Held = dict[str, list[Span]]
SHOWN = 4  # spans in one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The request at which two compared caches began to hold different parts of one prompt.

    Attributes:
        row: the request, with the answers of both caches.
        before: the parts of the prompt that both caches held before the request.
        after: the parts that the base cache and the head cache held after the request.
    """

    row: Row
    before: Held
    after: tuple[Held, Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The reasons why two compared caches, named base and head, answer a request differently.

    Attributes:
        row: the request, with the answers of both caches.
        last_use: number of the latest earlier request with the same first page. None means that
            there is none.
        held: the parts of the request's prompt that each cache held before the request.
        parting: the earlier request at which these parts began to differ. None means that they were
            equal.
    """

    row: Row
    last_use: int | None
    held: tuple[Held, Held]
    parting: Parting | None


def explain(
    row: Row, requests: Sequence[Request], pools: Pools, launches: tuple[Launch, Launch], logs: Path
) -> Explanation:
    """Find the request at which two compared caches begin to hold different pages of a prompt.

    The prompt is that of `row`, a request for which the two caches gave different answers. Both
    caches are started again and receive all requests up to this one.

    Raises:
        SideError: one of the caches cannot continue.
    """
    prompt = token_ids(requests[row.number])[: requests[row.number].prompt_len]
    page = pools.page_size
    users = [
        number
        for number in range(row.number)
        if np.array_equal(token_ids(requests[number])[:page], prompt[:page])
    ]
    parting = None
    held: tuple[Held, Held] = ({}, {})
    with ExitStack() as stack:
        base, head = open_sides(stack, pools, launches, logs)
        driver = Driver(requests, pools, (base, head))
        for number in range(row.number):
            earlier = driver.next_row()
            if not users or number < users[0]:
                continue  # a new prefix
            before, held = held[0], (base.probe(prompt), head.probe(prompt))
            if held[0] == held[1]:
                parting = None  # the difference has disappeared
            elif parting is None:
                parting = Parting(row=earlier, before=before, after=held)
    return Explanation(row=row, last_use=users[-1] if users else None, held=held, parting=parting)


def differing(base: Held, head: Held) -> tuple[str, ...]:
    return tuple(
        name for name in sorted({*base, *head}) if base.get(name, []) != head.get(name, [])
    )


def spans_in_words(spans: Sequence[Span] | None) -> str:
    if not spans:
        return "nothing"
    shown = [f"[{start:,}, {end:,})" for start, end in spans[:SHOWN]]
    more = len(spans) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def row_in_words(row: Row, names: tuple[str, str]) -> list[str]:
    sentences = [
        f"Request {row.number} (prompt of {row.prompt_len:,} tokens): {row.kind.value}."
        f" {names[0]} hit {hits_in_words(row.base)}; {names[1]} hit {hits_in_words(row.head)}."
    ]
    if row.base.admission != row.head.admission:
        sentences.append(f"Admission: {row.base.admission} against {row.head.admission}.")
    if changes := changes_in_words(row):
        sentences.append(f"Changes ({names[0]} → {names[1]}): {changes}.")
    return sentences


def in_words(explanation: Explanation, names: tuple[str, str]) -> list[str]:
    sentences = row_in_words(explanation.row, names)
    if explanation.last_use is None:
        sentences.append("No earlier request shares a prefix with it.")
    else:
        sentences.append(
            f"The last request that shares a prefix with it was {explanation.last_use}."
        )
    base_held, head_held = explanation.held
    parts = differing(base_held, head_held)
    if not parts:
        same = "; ".join(f"{name} {spans_in_words(base_held[name])}" for name in sorted(base_held))
        sentences.append(
            f"Before it arrived, both held the same parts of its prompt ({same or 'nothing'})."
        )
    for name in parts:
        sentences.append(
            f"Before it arrived, of its prompt in {name}, {names[0]} held tokens"
            f" {spans_in_words(base_held.get(name))} and {names[1]}"
            f" {spans_in_words(head_held.get(name))}."
        )
    if explanation.parting is not None:
        sentences += _parting_in_words(explanation.parting, names)
    return sentences


def changes_in_words(row: Row, most: int | None = None) -> str:
    sized = [
        (abs(head - base), name, base, head)
        for name, (base, head) in row.changes.items()
        if not name.startswith("pages/")
    ]
    shown = sized if most is None else sorted(sized, reverse=True)[:most]
    words = [
        f"{name.replace('moved/', 'copied/').replace('/', ' ', 1)} {base:,} → {head:,}"
        f" ({head - base:+,})"
        for _, name, base, head in shown
    ]
    if len(sized) > len(shown):
        words.append(f"and {len(sized) - len(shown)} more")
    return ", ".join(words)


def _parting_in_words(parting: Parting, names: tuple[str, str]) -> list[str]:
    row, parts = parting.row, differing(*parting.after)
    sentences = [
        f"They first held different parts of it during request {row.number}, in {', '.join(parts)}."
    ]
    for side, outcome, after in zip(names, (row.base, row.head), parting.after, strict=True):
        evicted = [
            f"{amount:,} of {name.removeprefix('evicted/')}"
            for name, amount in sorted(outcome.counts.items())
            if name.startswith("evicted/")
        ]
        was = "; ".join(
            f"{name} from {spans_in_words(parting.before.get(name))}"
            f" to {spans_in_words(after.get(name))}"
            for name in parts
        )
        sentences.append(
            f"During that request {side} evicted {', '.join(evicted) or 'nothing'}; what it held of"
            f" this prompt changed: {was}."
        )
    return sentences


def hits_in_words(outcome: Outcome) -> str:
    device, host, storage = outcome.hits
    words = f"{sum(outcome.hits):,} tokens ({device:,} device, {host:,} host, {storage:,} storage)"
    more = [
        f"{name.removeprefix('hit/').replace('/', ' on ')} {amount:,}"
        for name, amount in sorted(outcome.counts.items())
        if name.startswith("hit/") and amount
    ]
    return f"{words}, {', '.join(more)}" if more else words
