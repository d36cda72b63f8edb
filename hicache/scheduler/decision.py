"""What the scheduler decides about a request that waits, and why."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a request does not run now; counted as `scheduler/deferred_<reason>_count`."""

    running = "running"  # as many run as may
    tokens = "tokens"
    swa_tokens = "swa_tokens"
    slots = "slots"
    prefill_oom = "prefill_oom"  # there was room, and then no pages
    never = "never"  # nor can it ever


@dataclass(frozen=True, slots=True)
class Admit:
    """Now, and how many tokens the first chunk may have."""

    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Defer:
    """Not now, and why. For reason `tokens`, `needed` is not below `room` less what is reserved.

    `stands`: the next look would find the same, if the pools have not changed by then.
    `is_second`: it had room until its own path was locked.
    """

    reason: Reason
    stands: bool = False
    is_second: bool = False
    needed: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True)
class Reject:
    """Never, and why, in words."""

    why: str


Decision = Admit | Defer | Reject
