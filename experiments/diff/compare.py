"""Sends the same requests to two sides, and classifies the differences of their answers."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random

import numpy as np

from experiments.diff.engines import Launch, say
from experiments.diff.kept import KeptSide
from experiments.diff.process import SideProcess
from experiments.diff.protocol import STAGES, Call, Outcome, Pools, SideError, Tokens
from experiments.diff.serve import peak_bytes
from hicache.request import Request


class Kind(Enum):
    """How the answers of two compared caches, named base and head, differ for one request.

    If several kinds apply, the first one in this list counts.
    """

    fewer = "head hits fewer tokens"
    more = "head hits more tokens"
    tier = "the same hits, from other tiers"
    component = "window or state hit on another tier"
    admission = "a different admission decision"
    moved = "the same hits, different copies"
    evicted = "the same hits and copies, different evictions"
    locked = "different locks"
    held = "different amounts held or free"
    pages = "equal amounts held, but different pages"
    equal = "no difference"


HIT_KINDS = (Kind.fewer, Kind.more, Kind.tier, Kind.component)
KIND_OF_AREA = {
    "hit": Kind.component,
    "moved": Kind.moved,
    "evicted": Kind.evicted,
    "locked": Kind.locked,
    "held": Kind.held,
    "free": Kind.held,
    "pages": Kind.pages,
}
OpenSide = SideProcess | KeptSide
ADDED_UP = ("hit/", "moved/", "evicted/")  # areas of events, summed over all requests
LONG_EVERY = 7  # requests, where `Pools.is_eventful`
ABORTED_SHARE = 1 / 3  # of the requests, where `Pools.abort_seed`
AT_THE_END = ("held/", "locked/", "free/")  # areas of the state


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    number: int
    prompt_len: int
    base: Outcome
    head: Outcome

    @property
    def kind(self) -> Kind:
        base, head = self.base, self.head
        if sum(base.hits) != sum(head.hits):
            return Kind.fewer if sum(head.hits) < sum(base.hits) else Kind.more
        if base.hits != head.hits:
            return Kind.tier
        found = {KIND_OF_AREA[name.partition("/")[0]] for name in self.changes}
        if None not in (base.admission, head.admission) and base.admission != head.admission:
            found.add(Kind.admission)
        return next((kind for kind in Kind if kind in found), Kind.equal)

    @property
    def changes(self) -> dict[str, tuple[int, int]]:
        """Return all numbers that differ between two compared caches, as (base, head).

        For example, `moved/full/read` is the tokens of full-attention KV that were read from
        storage. `held/swa/host` is the sliding-window tokens that the host tier holds. Numbers that
        only one cache reports are left out.
        """
        base, head = (numbers_of(each) for each in (self.base, self.head))
        both = self.base.state.keys() & self.head.state.keys()
        one_sided = (self.base.state.keys() | self.head.state.keys()) - both
        return {
            name: (base.get(name, 0), head.get(name, 0))
            for name in sorted((base.keys() | head.keys()) - one_sided)
            if base.get(name, 0) != head.get(name, 0)
        }

    @property
    def weight(self) -> tuple[int, int]:
        sizes = {
            name: abs(head - base)
            for name, (base, head) in self.changes.items()
            if not name.startswith("pages/")
        }
        hits = sum(size for name, size in sizes.items() if name.startswith("hit/"))
        return hits, sum(sizes.values()) - hits


def numbers_of(outcome: Outcome) -> dict[str, int]:
    hits = zip(outcome.hits._fields, outcome.hits, strict=True)
    held = {f"held/{name}": amount for name, amount in outcome.held.items()}
    return {f"hit/full/{tier}": hit for tier, hit in hits} | {
        **outcome.counts,
        **held,
        **outcome.state,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answers of two compared caches, named base and head, to the same requests.

    Attributes:
        base: description of the base cache, with `engine` and `version`.
        head: description of the head cache.
        pools: pool sizes of both caches.
        rows: one row per request, with the answers of both caches.
        failure: the reason why a cache could not continue after the last row. None means that both
            caches answered all requests.
        peak_bytes: largest resident memory of base, head and this program. None means that the
            process failed.
    """

    base: dict[str, str]
    head: dict[str, str]
    pools: Pools
    rows: tuple[Row, ...]
    failure: str | None = None
    peak_bytes: tuple[int | None, ...] = ()

    @property
    def kinds(self) -> dict[Kind, int]:
        counts = Counter(row.kind for row in self.rows)
        return {kind: counts[kind] for kind in Kind if counts[kind]}

    @property
    def first_hit(self) -> Row | None:
        return next((row for row in self.rows if row.kind in HIT_KINDS), None)

    @property
    def first(self) -> Row | None:
        return next((row for row in self.rows if row.kind is not Kind.equal), None)

    def worst(self, count: int) -> list[Row]:
        differing = [row for row in self.rows if row.kind is not Kind.equal]
        return sorted(differing, key=lambda row: row.weight, reverse=True)[:count]

    @property
    def prompt_tokens(self) -> int:
        return sum(row.prompt_len for row in self.rows)

    def totals(self, side: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        outcomes: list[Outcome] = [getattr(row, side) for row in self.rows]
        for outcome in outcomes:
            numbers = numbers_of(outcome).items()
            total.update({name: number for name, number in numbers if name.startswith(ADDED_UP)})
            if outcome.admission is not None:
                total[f"admission/{outcome.admission}"] += 1
        if outcomes:
            numbers = numbers_of(outcomes[-1]).items()
            total.update({name: number for name, number in numbers if name.startswith(AT_THE_END)})
        return dict(sorted(total.items()))

    def hit_rate(self, side: str) -> float:
        hits = sum(sum(getattr(row, side).hits) for row in self.rows)
        return hits / max(self.prompt_tokens, 1)


def compare(
    requests: Sequence[Request],
    pools: Pools,
    launches: tuple[Launch, Launch],
    logs: Path,
    *,
    until_first: bool = False,
) -> Comparison:
    """Send the same requests to two caches at the same time, and compare their answers.

    At any time, the latest `pools.num_running` requests keep their pages locked. With
    `until_first`, the comparison ends at the first request whose cache hits differ.

    Raises:
        SideError: one of the caches cannot be started.
    """
    rows: list[Row] = []
    failure = None
    with ExitStack() as stack:
        sides = open_sides(stack, pools, launches, logs)
        driver = Driver(requests, pools, sides)
        try:
            for number in range(len(requests)):
                rows.append(driver.next_row())
                if until_first and rows[-1].kind in HIT_KINDS:
                    break
                if (number + 1) % 250 == 0:
                    say(f"{number + 1:,} of {len(requests):,} requests")
        except SideError as error:
            failure = f"at request {len(rows)} {error}"
    base, head = driver.about
    return Comparison(
        base=base,
        head=head,
        pools=pools,
        rows=tuple(rows),
        failure=failure,
        peak_bytes=(*(side.peak_bytes for side in sides), peak_bytes()),
    )


def open_sides(
    stack: ExitStack, pools: Pools, launches: tuple[Launch, Launch], logs: Path
) -> tuple[OpenSide, OpenSide]:
    def opened(launch: Launch, name: str) -> OpenSide:
        log = logs / f"{name}.log"
        if launch.kept is None:
            return stack.enter_context(SideProcess(launch, pools, log))
        return stack.enter_context(KeptSide(launch, pools, log, launch.kept))

    return opened(launches[0], "base"), opened(launches[1], "head")


class Driver:
    def __init__(
        self, requests: Sequence[Request], pools: Pools, sides: tuple[OpenSide, OpenSide]
    ) -> None:
        self._requests, self._pools, self._sides = requests, pools, sides
        self.about = sides[0].about(), sides[1].about()
        self._next = 0
        # by number of the next request: requests that end before it
        self._ends: dict[int, list[Call]] = {}
        self._stages = [""] * len(requests)
        if pools.abort_seed and all("aborts" in about for about in self.about):
            draw = Random(pools.abort_seed)
            self._stages = [
                draw.choice(STAGES) if draw.random() < ABORTED_SHARE else "" for _ in requests
            ]

    def next_row(self) -> Row:
        """Send the next request to both compared caches; return their answers.

        Earlier requests are finished first, if enough requests have arrived since.

        Raises:
            SideError: one or both of the caches cannot continue.
        """
        number, self._next = self._next, self._next + 1
        request = self._requests[number]
        calls, stage = self._ends.pop(number, []), self._stages[number]
        is_long = self._pools.is_eventful and number % LONG_EVERY == LONG_EVERY - 1
        stay = self._pools.num_running * (3 if is_long else 1)
        admit: Call = ("admit", number, token_ids(request), request.prompt_len)
        if stage in ("", STAGES[-1]):
            end: Call = ("abort" if stage else "finish", number)
            self._ends.setdefault(number + stay, []).append(end)
        else:
            admit += (stage,)
        calls.append(admit)
        for side in self._sides:
            side.ask(calls)
        outcomes: dict[str, Outcome] = {}
        errors: list[str] = []
        for name, side in zip(("base", "head"), self._sides, strict=True):
            try:
                outcomes[name] = side.take_outcome()
            except SideError as error:
                errors.append(str(error))
        if errors:
            raise SideError("; ".join(errors))
        return Row(number=number, prompt_len=request.prompt_len, **outcomes)


def token_ids(request: Request) -> Tokens:
    return np.frombuffer(request.prompt.to_bytes() + request.output.to_bytes(), "<i4")
