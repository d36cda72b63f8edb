"""A prompt that one engine computes and another decodes: what both know about it.

The decode engine promises which first tokens it holds; the prefill engine computes the prompt and
sends the pages after them. One handover is one attempt; a request may need several.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from hicache.cache.kinds import FULL, MAMBA, Kinds
from hicache.cache.tiers.transfer import Move, Work
from hicache.scheduler.queue_waits import Cause
from hicache.scheduler.request_state import RequestState

# of the engine that computes the prompt: counts of a request, and what it spends before its first
# token
COUNTED = ("recomputed_len", "retractions", "num_parts")
SPENT = ("own_ns", "shared_ns", "fence_ns", "load_back_ns")
Span = tuple[int, int, int]
FOUND = ("device_len", "host_len", "storage_len", "peer_len", "computed_len", "admitted_ns")


class Handover:
    """One attempt to compute a prompt on a prefill engine and to send its KV to a decode engine.

    `req` is the request on the decode engine, `prompt` the same on the prefill engine. The decode
    engine has promised to hold the first `promised_len` tokens. `prefill` and `decode` are the
    numbers of the engines. Of `num_sent` parcels with KV, `num_landed` have arrived or were lost.
    If `is_dead`, the attempt has failed or the client has given up; no more is sent.
    """

    def __init__(self, req: RequestState, promised_len: int, prefill: int, decode: int) -> None:
        self.req = req
        self.prompt = RequestState(req.request, req.tokens, req.number, req.submitted_ns)
        for name in ("remaining_output", "target_len", "admitted_ns", "first_token_ns", "place"):
            setattr(self.prompt, name, getattr(req, name))
        self.promised_len = self.sent_len = promised_len
        self.prefill, self.decode = prefill, decode
        self.num_sent = self.num_landed = 0
        self.is_whole = False  # the last chunk is sent
        self.is_dead = self.is_lost = False
        self.begun_ns: int | None = None  # when the decode engine admitted the request
        self.computed_ns: int | None = None
        self.arrived_ns: int | None = None
        self.ended_ns: int | None = None
        # of the decode engine: whether the promised tokens are on the device, or on their way
        self.is_restored = False
        self.to_host = False  # the KV goes to the host of the decode engine

    @property
    def is_settled(self) -> bool:
        """True if no KV is under way."""
        return self.num_landed == self.num_sent

    @property
    def has_arrived(self) -> bool:
        return self.is_whole and self.is_settled and not self.is_dead

    def account(self, now_ns: int) -> None:
        """Add to the request what its prompt has spent and found until `now_ns`."""
        req, prompt = self.req, self.prompt
        self.ended_ns = now_ns
        for name in COUNTED if req.first_token_ns is not None else (*COUNTED, *SPENT):
            setattr(req, name, getattr(req, name) + getattr(prompt, name))
        if req.first_token_ns is not None:
            return
        if req.admitted_ns is None:
            req.storage_wait_ns += prompt.storage_wait_ns
            req.storage_waits += prompt.storage_waits
            for cause, waited_ns in prompt.queue_ns.items():
                req.queue_ns[cause] += waited_ns
            for name in FOUND:
                setattr(req, name, getattr(prompt, name))
            until_ns = now_ns if req.admitted_ns is None else req.admitted_ns
            queued_ns = until_ns - req.submitted_ns - req.storage_wait_ns
            # its way between the engines, and to their next steps
            req.queue_ns[Cause.step] += queued_ns - sum(req.queue_ns.values())
        if self.computed_ns is not None:
            arrived_ns = now_ns if self.arrived_ns is None else self.arrived_ns
            req.transfer_ns = arrived_ns - self.computed_ns
            req.restore_ns = now_ns - arrived_ns


@dataclass(slots=True, kw_only=True, eq=False)
class Parcel:
    """KV, or a message without bytes, that one engine sends to another for a handover.

    Both engines learn when KV has arrived. `spans` are what it carries: kind, first page, end. A
    Mamba state counts as one page. `reason` is why a prefill engine can never compute the
    prompt; None for all other parcels.
    """

    handover: Handover
    source: int
    target: int
    num_bytes: int = 0
    spans: Items[Span] = ()
    reason: str | None = None

    @property
    def moves(self) -> list[Move]:
        """The copies of its spans between the device pages of both engines."""
        copies = []
        for kind, first, end in self.spans:
            source, target = (
                (req.sequence.working_slot or []) if kind == MAMBA else req.sequence.pages[kind]
                for req in (self.handover.prompt, self.handover.req)
            )
            copies.append(Move(kind, source[first:end], target[first:end]))
        return copies


@dataclass(slots=True, kw_only=True, eq=False)
class Outage:
    """The loss of an engine with its caches, or its return."""

    is_over: bool


News = Parcel | Outage  # what reaches an engine from outside, other than requests
Sent = Work | Parcel  # what an engine's executor is told to do beside its steps


def spans_to_send(
    kinds: Kinds, promised_len: int, start: int, end: int, target_len: int
) -> list[Span]:
    """Return what a parcel with tokens `[start, end)` of a prompt carries.

    Only the last parcel, whose `end` is `target_len`, carries the last, partial page, the sliding
    windows at the end, and the Mamba state.
    """
    size = kinds.page_size
    if end < target_len:
        return [(FULL, start // size, end // size)]
    last = -(-target_len // size)
    windows = [
        (kind, max(promised_len, target_len - length) // size, last)
        for kind, length in kinds.window_lens.items()
    ]
    return [(FULL, start // size, last), *windows, *((kind, 0, 1) for kind in kinds.points)]
