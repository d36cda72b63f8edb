"""Makes a failing scenario small: fewer requests, and only the choices that it takes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.fuzz.scenario import PLAIN, Choices, draw, plan_of
from tests.fuzz.talk import NUM_REQUESTS
from tests.fuzz.trial import try_choices

Attempt = Callable[[Choices, int | None], object]  # raises if something is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a scenario came to, and the least that comes to the same."""

    name: str  # seed/number
    error: str
    choices: Mapping[str, str]  # those that are not plain
    limit: int  # requests
    command: str | None

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.choices.items())
        lines = [
            f"scenario {self.name}: {self.error}",
            f"  again: python -m tests.fuzz {self.name}",
            f"  small: python -m tests.fuzz --limit {self.limit} {words}",
        ]
        return "\n".join(lines + ([f"  as run: {self.command}"] if self.command else []))


def find(name: str, attempt: Attempt = try_choices) -> Finding | None:
    """Try the scenario `seed/number`; None if nothing is wrong with it."""
    seed, number = map(int, name.split("/"))
    return examine(name, draw(seed, number), None, attempt)


def examine(
    name: str, choices: Choices, limit: int | None, attempt: Attempt = try_choices
) -> Finding | None:
    """Try these choices; None if nothing is wrong with them."""
    error = _error(attempt, choices, limit)
    if error is None:
        return None
    kind = signature(error)

    def fails(fewer: Choices, requests: int | None) -> bool:
        other = _error(attempt, fewer, requests)
        return other is not None and signature(other) == kind

    small, requests = shrink(choices, limit or NUM_REQUESTS, fails)
    last = _error(attempt, small, requests) or error
    return Finding(
        name=name,
        error=f"{type(last).__name__}: {last}",
        choices={knob: value for knob, value in small.items() if value != PLAIN[knob]},
        limit=requests,
        command=plan_of(small, requests).command,
    )


def shrink(
    choices: Choices, limit: int, fails: Callable[[Choices, int], bool]
) -> tuple[dict[str, str], int]:
    """The choices with as many plain ones, and as few requests, as still fail."""
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
    """What errors with one cause have in common: all but names and numbers."""
    head = re.sub(r"<.*?>|[\d.]+", "#", str(error).split(": ")[0])
    return f"{type(error).__name__}: {head}"


def _error(attempt: Attempt, choices: Choices, limit: int | None) -> Exception | None:
    try:
        attempt(choices, limit)
    except Exception as error:
        return error
    return None
