"""Every reason for which a token is computed instead of being a cache hit.

The reason is the last event that could have saved the token. A token that no earlier request had is
`first_seen`. If storage could have restored the token, the reason says why the prefetch did not.
Otherwise the reason says why the token was not in storage. Without storage, it says why the token
left the host or the device. A prefix may lack only its sliding window or its Mamba state. Then the
reason is that of the window or of the state.
"""

from typing import NamedTuple

REASONS = {
    "first_seen": "no earlier request contained it",
    "last_token": "the last prompt token is always computed: it yields the first output token",
    "page_rounding": "it is on the prompt's incomplete last page, and only whole pages are cached",
    "being_computed": "another request was still computing it",
    "thrown_away": "its engine was lost, or its request was aborted or retracted and dropped it",
    "retracted": "this request had computed or hit it before it was retracted",
    "evicted_device_for_prefill": "evicted from the device, with no host copy, for a prompt",
    "evicted_device_for_decode": "evicted from the device, with no host copy, for an answer",
    "evicted_device_for_load_back": "evicted from the device, with no host copy, for a load-back",
    "evicted_device_for_slot": "evicted from the device, with no host copy, for another state",
    "evicted_host_for_back_up": "evicted from the host for a back-up from the device",
    "evicted_host_for_prefetch": "evicted from the host for a prefetch from storage",
    "back_up_dropped": "the host had no room for a copy of it",
    "write_dropped": "not written to storage: the write queue was full (storage.write_queue_gib)",
    "write_pending": "its write to storage was not finished yet",
    "never_written": "storage.write did not select it for storage",
    "storage_lost": "storage refused to store it, or no longer had it",
    "prefetch_declined_too_short": "storage could supply fewer than prefetch.threshold tokens",
    "prefetch_declined_no_host": "the host tier has no page to read it into (cache.host_gib)",
    "prefetch_declined_rate_limited": "other prefetches used up prefetch.occupied_share",
    "prefetch_declined_anchor_not_on_host": "the prefix before it was not on the host",
    "prefetch_no_room": "the host had no room for the prefetch",
    "prefetch_cut": "the prefetch was cut to the free host memory",
    "prefetch_late": "the request started before storage had answered or begun to read",
    "prefetch_stopped": "the stop policy ended the prefetch before this was read",
    "prefetch_lost": "storage or a peer reported it as present but did not deliver it",
    "load_back_too_short": "the host hit was shorter than compat.rules.load_back_threshold",
    "load_back_failed": "it was on the host, but the device had no room for it",
    "dropped_for_draft": "it was cached, and computed again for the draft (speculation.key)",
    "hit_given_up": "the hit was not used, since it would have left no room for the request",
    "window_not_kept": "its full KV was cached, but no sliding window to continue from",
    "state_not_kept": "its full KV was cached, but no Mamba state to continue from",
    "other_engine": "only another engine had it cached",
}


class Eviction(NamedTuple):
    when_ns: int
    request_id: int
    num_pages: int


class Span(NamedTuple):
    """A range of prompt tokens, and the reason why they had to be computed.

    Attributes:
        start, end: the range: the first token, and the token after the last.
        reason: a key of `REASONS`, such as `evicted_host_for_prefetch`.
        kind: what the cache lacked: 0 means full-attention KV, 1 sliding-window KV, 2 a Mamba
            state.
        evictions: when and for which request the pages of these tokens were last evicted. It is
            empty if evictions are not recorded.
    """

    start: int
    end: int
    reason: str
    kind: int = 0
    evictions: tuple[Eviction, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start
