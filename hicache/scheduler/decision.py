"""Decisions about a waiting request, with their reasons."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a request does not run now; counted as `scheduler/deferred_<reason>_count`."""

    running = "running"  # `scheduler.max_running` requests run
    tokens = "tokens"
    swa_tokens = "swa_tokens"
    slots = "slots"
    prefill_oom = "prefill_oom"  # admission found room, but prefill found no pages
    never = "never"  # the request can never run


@dataclass(frozen=True, slots=True)
class Admit:
    """Run the request now, with a first chunk of at most `chunk_tokens`."""

    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Defer:
    """Do not run the request now. For reason `tokens`, `needed` >= `room` - reserved tokens.

    `stands`: the decision stays the same while the pools do not change. `is_second`: the request
    fitted until its own path was locked.
    """

    reason: Reason
    stands: bool = False
    is_second: bool = False
    needed: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True)
class Reject:
    """Never run the request; `why` is a sentence."""

    why: str


Decision = Admit | Defer | Reject
