"""Why the first request differs: when the two sides began to hold other parts of its prefix.

The sides run once more up to that request, and both are asked after each request what they hold of
its prompt. Where the answers part is the request during which the difference was made; what each
side held just before and after it, and evicted during it, is the explanation.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from experiments.diff.compare import Row, next_row, open_sides, token_ids
from experiments.diff.engines import Launch
from experiments.diff.protocol import Outcome, Pools, Span
from hicache.request import Request

Held = dict[str, list[Span]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where two sides began to hold other parts of one prompt.

    Attributes:
        row: the request during which it happened, and their answers.
        before: what both held before it.
        after: what base and head held after it.
    """

    row: Row
    before: Held
    after: tuple[Held, Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The first request that differs.

    Attributes:
        row: it and both answers.
        last_use: the latest earlier request that begins with the same page; None: there is none.
        held: by base and by head, of its prompt, before it came.
        parting: None if both held the same of it until it came.
    """

    row: Row
    last_use: int | None
    held: tuple[Held, Held]
    parting: Parting | None


def explain(
    row: Row,
    requests: Sequence[Request],
    pools: Pools,
    launches: tuple[Launch, Launch],
    logs: Path,
) -> Explanation:
    """Run both sides up to `row` and look where they part.

    Raises:
        SideError: a side cannot go on.
    """
    prompt = token_ids(requests[row.number])[: requests[row.number].prompt_len]
    page = pools.page_size
    users = [
        number
        for number in range(row.number)
        if (token_ids(requests[number])[:page] == prompt[:page]).all()
    ]
    parting = None
    held: tuple[Held, Held] = ({}, {})
    with ExitStack() as stack:
        base, head = sides = open_sides(stack, pools, launches, logs)
        base.about(), head.about()
        for number in range(row.number):
            earlier = next_row(sides, requests, number, pools)
            if not users or number < users[0]:
                continue  # nobody has had this prefix yet
            before, held = held[0], (base.probe(prompt), head.probe(prompt))
            if held[0] == held[1]:
                parting = None  # what differed meanwhile is equal again
            elif parting is None:
                parting = Parting(row=earlier, before=before, after=held)
    return Explanation(row=row, last_use=users[-1] if users else None, held=held, parting=parting)


def differing(base: Held, head: Held) -> tuple[str, ...]:
    """The `component/tier` of which the two hold other parts."""
    return tuple(
        name for name in sorted({*base, *head}) if base.get(name, []) != head.get(name, [])
    )


def spans_in_words(spans: Sequence[Span] | None) -> str:
    """Tokens held, for people; a long list is cut short."""
    if not spans:
        return "nothing"
    shown = [f"[{start:,}, {end:,})" for start, end in spans[:4]]
    more = len(spans) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def in_words(explanation: Explanation, names: tuple[str, str]) -> list[str]:
    """The explanation as sentences, `names` those of base and head."""
    row = explanation.row
    sentences = [
        f"Request {row.number} ({row.prompt_len:,} tokens of prompt): {row.kind.value}."
        f" {names[0]} hit {hits_in_words(row.base)}; {names[1]} hit {hits_in_words(row.head)}."
    ]
    if row.base.admission != row.head.admission:
        sentences.append(f"Admission: {row.base.admission} against {row.head.admission}.")
    if explanation.last_use is None:
        sentences.append("No earlier request begins like it.")
    else:
        sentences.append(f"The last request that begins like it was {explanation.last_use}.")
    base_held, head_held = explanation.held
    parts = differing(base_held, head_held)
    if not parts:
        same = "; ".join(f"{name} {spans_in_words(base_held[name])}" for name in sorted(base_held))
        sentences.append(
            f"Before it came both held the same of its prompt ({same}), so they differ in what they"
            " made of it: the match, the prefetch or the load-back."
        )
    for name in parts:
        sentences.append(
            f"Before it came, of {name} {names[0]} held {spans_in_words(base_held.get(name))} and"
            f" {names[1]} {spans_in_words(head_held.get(name))}."
        )
    if parts and explanation.parting is not None:
        sentences += _parting_in_words(explanation.parting, names)
    return sentences


def _parting_in_words(parting: Parting, names: tuple[str, str]) -> list[str]:
    row, parts = parting.row, differing(*parting.after)
    sentences = [f"They parted during request {row.number}, over {', '.join(parts)}."]
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
            f"During it {side} evicted {', '.join(evicted) or 'nothing'}; of this prompt it went:"
            f" {was}."
        )
    return sentences


def hits_in_words(outcome: Outcome) -> str:
    """Hits by tier, and of window and state."""
    device, host, storage = outcome.hits
    words = f"{sum(outcome.hits):,} tokens ({device:,} device, {host:,} host, {storage:,} storage)"
    more = [
        f"{name.removeprefix('hit/').replace('/', ' on ')} {amount:,}"
        for name, amount in sorted(outcome.counts.items())
        if name.startswith("hit/") and amount
    ]
    return f"{words}, {', '.join(more)}" if more else words
