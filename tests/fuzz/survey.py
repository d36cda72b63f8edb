"""Tries many scenarios, and says what they found and how much of the space they reached."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context

from tests.fuzz.knobs import BARRED, KNOBS
from tests.fuzz.scenario import Choices, draw, parse
from tests.fuzz.shrink import Finding, find
from tests.fuzz.trial import Trial

WORKERS = 2

Pair = tuple[tuple[str, str], tuple[str, str]]  # of (knob, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What came of one scenario. One with a finding has no counts."""

    name: str  # seed/number
    finding: Finding | None
    contends: bool = False  # it evicted, loaded back and hit storage
    num_requests: int = 0
    num_rejected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What came of many."""

    visits: Sequence[Visit]

    @property
    def findings(self) -> list[Finding]:
        """All that is wrong."""
        return [visit.finding for visit in self.visits if visit.finding is not None]

    @property
    def contending_share(self) -> float:
        """Of the scenarios, those with evictions, load-backs and storage hits."""
        return sum(visit.contends for visit in self.visits) / len(self.visits)

    @property
    def rejected_share(self) -> float:
        """Of all requests."""
        num_requests = sum(visit.num_requests for visit in self.visits)
        return sum(visit.num_rejected for visit in self.visits) / max(num_requests, 1)

    @property
    def missed_pairs(self) -> set[Pair]:
        """Values of two knobs that no scenario had together."""
        return all_pairs().difference(*(pairs_of(draw(*parse(each.name))) for each in self.visits))

    def __str__(self) -> str:
        num_pairs, num_missed = len(all_pairs()), len(self.missed_pairs)
        return (
            f"{len(self.visits)} scenarios, {len(self.findings)} findings; "
            f"{num_pairs - num_missed} of {num_pairs} pairs of values; "
            f"{self.contending_share:.1%} evict, load back and hit storage; "
            f"{self.rejected_share:.1%} of requests rejected"
        )


def survey(names: Sequence[str]) -> Iterator[Visit]:
    """Try the scenarios in two processes; in order."""
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        yield from workers.map(visit, names, chunksize=5)


def visit(name: str) -> Visit:
    """Try one."""
    found = find(name)
    if isinstance(found, Finding):
        return Visit(name=name, finding=found)
    return Visit(
        name=name,
        finding=None,
        contends=contends(found),
        num_requests=len(found.records),
        num_rejected=int(found.summary["request/rejected_count"]),
    )


def contends(trial: Trial) -> bool:
    """Whether the run evicted, loaded back and hit storage."""
    summary = trial.summary
    evicts = any(count for key, count in summary.items() if key.startswith("evict/"))
    loads = summary["transfer/load_back_bytes"]
    return bool(evicts and loads and summary["cache/storage_hit_tokens"])


def pairs_of(choices: Choices) -> set[Pair]:
    """Every two of the choices."""
    return set(combinations([(knob.name, choices[knob.name]) for knob in KNOBS], 2))


def all_pairs() -> set[Pair]:
    """Every two values of two knobs, but for those that are barred."""
    pairs: set[Pair] = set()
    for left, right in combinations(KNOBS, 2):
        pairs |= {((left.name, a), (right.name, b)) for a in left.values for b in right.values}
    return pairs - {*BARRED, *((other, one) for one, other in BARRED)}


def enough(seed: int, least: int) -> list[int]:
    """The numbers of the first scenarios, and of later ones that have a pair none before had."""
    missed, numbers = all_pairs(), list[int]()
    number = 0
    while missed or number < least:
        found = pairs_of(draw(seed, number)) & missed
        if number < least or found:
            numbers.append(number)
            missed -= found
        number += 1
    return numbers


def numbered(seed: int, numbers: Iterable[int]) -> list[str]:
    """The names of scenarios."""
    return [f"{seed}/{number}" for number in numbers]
