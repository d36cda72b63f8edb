"""Tries scenarios, and shrinks a failing one to few requests and few choices that are not plain.

The shrinker is our own because hypothesis cannot shrink a scenario that it has not drawn itself.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from tests.fuzz.scenario import PLAIN, Choices, draw
from tests.fuzz.talk import NUM_REQUESTS
from tests.fuzz.trial import Trial, try_choices

Attempt = Callable[[Choices, int | None], Trial]  # raises if something is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The error of a scenario, and the smallest scenario with the same error."""

    name: str  # seed/number
    error: str
    choices: Mapping[str, str]  # those that are not plain
    limit: int  # requests

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.choices.items())
        return (
            f"scenario {self.name}: {self.error}\n"
            f"  again: python -m tests.fuzz {self.name}\n"
            f"  small: python -m tests.fuzz --limit {self.limit} {words}"
        )


def try_all(names: Sequence[str], fixed: Choices | None = None) -> Iterator[Finding | bool]:
    """Try scenarios in two processes; yield a finding, or True if all tiers were used.

    The choices of `fixed` are the same in all of them.
    """
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        yield from workers.map(partial(_try, fixed=fixed or {}), names, chunksize=5)


def _try(name: str, fixed: Choices) -> Finding | bool:
    found = find(name, fixed)
    if isinstance(found, Finding):
        return found
    evicts = any(count for key, count in found.summary.items() if key.startswith("evict/"))
    used = ("transfer/load_back_bytes", "cache/storage_hit_tokens")
    return evicts and all(found.summary[key] for key in used)


def find(name: str, fixed: Choices | None = None) -> Finding | Trial:
    """Try the scenario `seed/number` with these choices fixed; return a finding or results."""
    seed, number = map(int, name.split("/"))
    fixed = fixed or {}
    words = (f"{knob}={value}" for knob, value in fixed.items())
    return examine(" ".join((name, *words)), draw(seed, number, fixed), None)


def examine(
    name: str, choices: Choices, limit: int | None, attempt: Attempt = try_choices
) -> Finding | Trial:
    """Try these choices and return the results; if they fail, shrink them to a finding."""
    result = _attempt(attempt, choices, limit)
    if isinstance(result, Trial):
        return result
    kind = signature(result)

    def fails(fewer: Choices, requests: int | None) -> bool:
        other = _attempt(attempt, fewer, requests)
        return isinstance(other, Exception) and signature(other) == kind

    small, requests = shrink(choices, limit or NUM_REQUESTS, fails)
    return Finding(
        name=name,
        error=f"{type(result).__name__}: {result}",
        choices={knob: value for knob, value in small.items() if value != PLAIN[knob]},
        limit=requests,
    )


def shrink(
    choices: Choices, limit: int, fails: Callable[[Choices, int], bool]
) -> tuple[dict[str, str], int]:
    """Return the choices with as many plain ones, and as few requests, as still fail."""
    small = dict(choices)
    before = None
    while before != (small, limit):
        before = dict(small), limit
        for fewer in (limit // 2, limit * 3 // 4, limit - 1):
            if 0 < fewer < limit and fails(small, fewer):
                limit = fewer
        for knob, plain in PLAIN.items():
            if small[knob] != plain and fails(small | {knob: plain}, limit):
                small[knob] = plain
    return small, limit


def signature(error: Exception) -> str:
    """Return an error without names and numbers, so that errors with one cause are equal."""
    head = re.sub(r"<.*?>|[\d.]+", "#", str(error).split(": ")[0])
    return f"{type(error).__name__}: {head}"


def _attempt(attempt: Attempt, choices: Choices, limit: int | None) -> Trial | Exception:
    try:
        return attempt(choices, limit)
    except Exception as error:
        return error
