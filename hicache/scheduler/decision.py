"""Decisions about a waiting request, with their reasons."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a waiting request does not run now.

    The counter `scheduler/deferred_<reason>_count` counts the requests of each reason.
    """

    running = "running"  # `scheduler.max_running` requests run
    tokens = "tokens"
    swa_tokens = "swa_tokens"
    slots = "slots"
    chunk = "chunk"  # less than a page is left of the step's prompt tokens
    prefill_oom = "prefill_oom"  # admission found room, but prefill found no pages
    never = "never"  # the request can never run


@dataclass(slots=True)
class Admit:
    """The decision to run a request now, with a first chunk of at most `chunk_tokens` tokens."""

    chunk_tokens: int


@dataclass(slots=True)
class Defer:
    """The decision that a waiting request does not run now, with the reason.

    Attributes:
        reason: why the request does not run.
        stands: True if asking again is useless until memory is freed or taken.
        is_second: True if a second check failed, after the cached prefix of the request was locked
            against eviction.
        needed: KV tokens that the request needs, for the reason `tokens`.
        room: KV tokens that are free or can be evicted, for the same reason.
    """

    reason: Reason
    stands: bool = False
    is_second: bool = False
    needed: int = 0
    room: int = 0


@dataclass(slots=True)
class Reject:
    """The decision never to run a request; `why` is the reason as a sentence."""

    why: str


Decision = Admit | Defer | Reject
