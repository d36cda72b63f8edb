"""Every reason for which a token is computed.

A token's reason is the last thing that would have saved it. What nobody had seen is `first_seen`.
Of what somebody had, storage is asked last: if it could have restored the token, the prefetch says
why it did not; if not, whatever kept the token from storage does; without storage, whatever took it
from the host or the device. Where pages are held and their window or state is not, the story told
is that of the window or the state.
"""

from typing import NamedTuple

from hicache.cache.tree.node import FULL

REASONS = {
    "first_seen": "no request before had it",
    "last_token": "the last token of a prompt is always computed: the answer begins with it",
    "page_rounding": "it is on the prompt's last page, and only whole pages are kept",
    "being_computed": "another request was still computing it",
    "thrown_away": "it was computed for a request that was sent back or given up on",
    "retracted": "this request itself had it, or could have had it, before it was sent back",
    "evicted_device_for_prefill": "it left the device, with no copy on the host, for a prompt",
    "evicted_device_for_decode": "it left the device, with no copy on the host, for an answer",
    "evicted_device_for_load_back": "it left the device, with no copy on the host, for a load-back",
    "evicted_device_for_slot": "it left the device, with no copy on the host, for another state",
    "evicted_host_for_back_up": "it left the host for what was backed up from the device",
    "evicted_host_for_prefetch": "it left the host for what was read from storage",
    "back_up_dropped": "there was no room on the host for its copy",
    "write_dropped": "the queue of writes to storage was full (storage.write_queue_gib)",
    "write_pending": "its write to storage was still under way",
    "never_written": "it was not worth writing to storage (storage.write)",
    "storage_lost": "storage did not take it, or has it no more",
    "prefetch_declined_too_short": "storage could bring less than prefetch.threshold",
    "prefetch_declined_rate_limited": "too much was being prefetched (prefetch.occupied_share)",
    "prefetch_declined_anchor_not_on_host": "the prefix before it was not on the host",
    "prefetch_no_room": "the prefetch found no room on the host",
    "prefetch_cut": "the prefetch was cut to the room there was on the host",
    "prefetch_late": "the request went on before storage had answered or begun to read",
    "prefetch_stopped": "the stop policy ended the prefetch before all was read",
    "prefetch_lost": "storage said that it had it, and did not deliver",
    "load_back_too_short": "less than cache.load_back_threshold was on the host",
    "load_back_failed": "it was on the host, and there was no room on the device",
    "hit_given_up": "using what was held would have left the request no room",
    "window_not_kept": "its pages were held; a window to go on with was never kept there",
    "state_not_kept": "its pages were held; a state to go on from was never kept there",
    "other_engine": "only another engine had it",
}


class Eviction(NamedTuple):
    """When pages were last lost, for whose sake (a request), and how many."""

    when_ns: int
    request_id: int
    num_pages: int


class Span(NamedTuple):
    """Tokens `[start, end)` of a prompt, and why they are computed.

    `kind`: the component that was missing. `evictions`: how it was last lost, if that was asked.
    """

    start: int
    end: int
    reason: str
    kind: int = FULL
    evictions: tuple[Eviction, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return self.end - self.start
