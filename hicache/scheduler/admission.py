"""Admission: whether a request or a run of decode steps fits, and how long a deferral stands."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Protocol

from hicache.cache.kinds import FULL
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.node import DEVICE, MatchResult
from hicache.config import Batching, SchedulerConfig
from hicache.rules import Rules
from hicache.scheduler.decision import Admit, Defer, Reason
from hicache.scheduler.request_state import RequestState

TOGETHER = (Batching.prompts_together, Batching.prompts_mixed)


def ceil_page(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


@dataclass(slots=True, kw_only=True)
class StepBudget:
    """What one step may still compute, and the memory that is already reserved for requests.

    A budget lasts for one scan of the queue.

    `chunk_tokens`: prompt tokens that the step may still compute. `reserved_tokens`: full-attention
    KV tokens that are reserved, but not allocated yet. `reserved_windows`: the same for each kind
    of sliding window, in tokens. `num_running`: requests that decode. `num_ending`: requests whose
    answers are complete, or whose KV is sent to another engine, and that still hold their memory.
    """

    chunk_tokens: int  # extend tokens left
    reserved_tokens: float  # full tokens reserved and not yet taken
    num_running: int = 0
    num_ending: int = 0
    reserved_windows: dict[int, int] = field(default_factory=dict)  # by kind


class NewTokenRatio:
    """Computes the fraction of future answer tokens for which admission reserves memory.

    The fraction falls linearly from `new_token_ratio` to `new_token_ratio_floor` over
    `new_token_ratio_decay_steps` decode steps. It rises when memory runs out and a running request
    is sent back to the queue (a retraction).
    """

    def __init__(self, config: SchedulerConfig, rules: Rules) -> None:
        self._base = self._initial = config.new_token_ratio
        self._floor = min(rules.new_token_ratio_floor, self._base)
        self._decay = (self._base - self._floor) / max(rules.new_token_ratio_decay_steps, 1)
        self._steps = 0

    def after(self, num_steps: int = 0) -> float:
        steps = self._steps + num_steps
        return max(self._floor, self._base - steps * self._decay) if steps else self._base

    def decoded(self, num_steps: int) -> None:
        self._steps += num_steps

    def retracted(self, left: Sequence[RequestState]) -> None:
        """Set the reserved fraction of answer tokens anew after a retraction, by SGLang's formula.

        A retraction sends a running request back to the queue, for lack of memory. `left` are the
        requests that still run.
        """
        decoded = sum(req.decoded for req in left)
        max_new = sum(req.request.output_len for req in left)
        self._base = min(1.0, (decoded + 20 * len(left)) / (max_new + 1))
        self._steps = 0

    def reset(self) -> None:
        self._base, self._steps = self._initial, 0


class WindowCharge(Protocol):
    """Returns how many tokens a request is charged in a sliding-window pool.

    Args:
        extend: tokens of the request that must be computed.
        chunk: tokens that the current step can still compute.
        window: length of the sliding window in tokens.
        page: tokens per page.
        swa_host_hit_length: window tokens to load from host to device; 0 once device pages are
            allocated for them.
        max_new: answer tokens for which memory is reserved.

    The charge must not fall as `extend` and `chunk` grow, because admission finds the longest chunk
    that fits by bisection. Example: `return max(extend, window) + page + swa_host_hit_length`.
    """

    def __call__(
        self,
        *,
        extend: int,
        chunk: int,
        window: int,
        page: int,
        swa_host_hit_length: int,
        max_new: int,
    ) -> int: ...


class Admission:
    """Decides whether a request fits in the memory pools, and reserves room for it.

    KV is counted in tokens, and Mamba states in slots of one state each. `new_token_ratio` is the
    fraction of the answers for which memory is reserved.
    """

    def __init__(
        self, cache: PrefixCache, config: SchedulerConfig, window_charge: WindowCharge
    ) -> None:
        self.new_token_ratio = NewTokenRatio(config, cache.rules)
        self._window_charge = window_charge
        self._cache = cache
        self._config, self._rules = config, cache.rules
        self._page = cache.page_size

    def decide(self, req: RequestState, match: MatchResult, budget: StepBudget) -> Admit | Defer:
        cache, page = self._cache, self._page
        extend = req.target_len - match.usable_len
        max_new = min(req.remaining_output, self._rules.clip_new_tokens)
        chunk = budget.chunk_tokens
        # a shortage stands unless what another kind frees may end it
        stands = not cache.device.is_shared
        promised: dict[int, float] = {FULL: budget.reserved_tokens, **budget.reserved_windows}
        own: dict[int, float] = {}  # what this request takes of the kinds so far
        # device data behind a missing state or window gets locked, and needs no new pages
        if self._config.batching in TOGETHER:  # but SGLang counts it
            beyond = req.target_len - match.device_prefix_len
        else:
            beyond = extend + match.host_hit_length
        own[FULL] = needed = beyond + max_new + page
        room = cache.room()
        if needed >= room - cache.taken(FULL, promised):
            return Defer(Reason.tokens, stands=stands, needed=needed, room=room)
        # of windows also the pages of tokens that are computed again
        windows = req.target_len - cache.tree.kinds.replay_start(match.usable_len // page) * page
        for kind in cache.tree.kinds.window_lens:
            left = cache.room(kind) - cache.taken(kind, promised) - cache.taken(kind, own)
            remaining = floor(left)
            host_hit = match.host_hits[kind]
            needed = self.charge(kind, ceil_page(windows, page), max_new, chunk, host_hit)
            if needed >= remaining:
                capacity = cache.pools[DEVICE][kind].capacity
                # a temporary shortage is waited out; a chunk that can never fit is cut
                if capacity is None or needed < capacity * page - cache.taken(kind, own):
                    return Defer(Reason.swa_tokens, stands=stands)
                chunk = self._fitting_chunk(kind, remaining, max_new, chunk, host_hit)
                if not chunk:
                    return Defer(Reason.swa_tokens, stands=stands)
                needed = remaining
            own[kind] = needed
        for kind in cache.tree.kinds.points:
            needed = cache.rules.states_per_request + match.host_hits[kind]
            taken = cache.taken(kind, promised) + cache.taken(kind, own)
            if needed > cache.room(kind) - taken:
                return Defer(Reason.slots, stands=stands)
        if self._config.batching in TOGETHER and chunk < page:
            return Defer(Reason.chunk)
        return Admit(chunk)

    def reserve(self, req: RequestState, chunk_end: int, budget: StepBudget) -> None:
        page = self._page
        max_new = min(req.remaining_output, self._rules.clip_new_tokens)
        is_whole = chunk_end == req.target_len
        budget.reserved_tokens += req.target_len - chunk_end + page + (max_new if is_whole else 0)
        for kind in self._cache.tree.kinds.window_lens:
            taken = ceil_page(chunk_end - req.kv_len, page)
            extend = ceil_page(req.extend_len, page)
            needed = self.charge(kind, extend, max_new, budget.chunk_tokens, 0)
            promised = budget.reserved_windows.get(kind, 0)
            budget.reserved_windows[kind] = promised + max(needed - taken, 0)

    def reserved_tokens(
        self, running: Sequence[RequestState], partial: RequestState | None
    ) -> float:
        ratio = self.new_token_ratio.after()
        reserved = self._answers(running) * ratio
        if partial is not None:
            reserved += partial.extend_len + self._page
            reserved += min(partial.remaining_output, self._rules.clip_new_tokens) * ratio
        return reserved

    def steps_deferred(self, defer: Defer, running: Sequence[RequestState], wanted: int) -> int:
        """Return how many decode steps may pass before a request that did not fit is checked again.

        `defer` is the decision about that request, and `running` are the requests that decode. The
        result lies between 1 and `wanted`. The decision can change when a running request needs a
        new page, or frees window pages of its prompt in its first decode step. If the request did
        not fit into the tokens of the device, it can also change because with each step fewer
        tokens are reserved for answers.
        """
        if not defer.stands:
            return 1
        if defer.reason is Reason.running:
            return wanted
        if running[0].gains:  # what is left of answers shrinks by any number
            return 1
        windows, page = self._cache.tree.kinds.window_lens, self._page
        if windows and any(req.kv_len // page > req.sequence.left_page for req in running):
            return 1
        steps = steps_in_page(running, page, wanted)
        if defer.reason is Reason.tokens:
            # filled pages that were free only add to the shortage, unless windows may be the
            # shortage before a path is locked
            if not (defer.is_second and windows):
                steps = steps_in_free_pages(self._cache, running, wanted)

            def fits(later: int) -> bool:
                reserved = self._answers(running, later) * self.new_token_ratio.after(later)
                return defer.needed < defer.room - reserved

            # the reserved tokens only shrink
            return 1 + bisect_left(range(1, steps), x=True, key=fits)
        return steps

    def _answers(self, running: Sequence[RequestState], later: int = 0) -> int:
        clip = self._rules.clip_new_tokens + later
        left = [req.remaining_output for req in running]
        if left and max(left) > clip:
            left = [min(each, clip) for each in left]
        return sum(left) - later * len(left)

    def _fitting_chunk(
        self, kind: int, remaining: int, max_new: int, chunk: int, host_hit: int
    ) -> int:
        # the longest chunk whose charge is at most `remaining`: whole pages, or all of `chunk`; 0
        # if no page fits. The charge is that of an empty chunk plus what the chunk adds to a full
        # window
        page, window = self._page, self._cache.tree.kinds.window_lens[kind]

        def charge(tokens: int) -> int:
            return self.charge(kind, tokens, max_new, tokens, host_hit)

        room = remaining - charge(0) + charge(window)

        def is_too_long(num_pages: int) -> bool:
            return charge(window + num_pages * page) > room

        chunk_pages = ceil_page(chunk, page) // page
        fits = bisect_left(range(1, chunk_pages + 1), x=True, key=is_too_long)
        return min(chunk, fits * page)

    def charge(self, kind: int, extend: int, max_new: int, chunk: int, host_hit: int) -> int:
        return self._window_charge(
            extend=extend,
            chunk=chunk,
            window=self._cache.tree.kinds.window_lens[kind],
            page=self._page,
            swa_host_hit_length=host_hit,
            max_new=max_new,
        )


def steps_with_pages(cache: PrefixCache, running: Sequence[RequestState], wanted: int) -> int:
    """Return for how many decode steps the memory pools have pages for all running requests.

    The result is a safe estimate between 0 and `wanted`. 0 means that there may be too few pages
    even for one step.
    """
    page, kinds = cache.page_size, cache.tree.kinds.paged
    # an upper bound for any lengths
    most = len(running) * (wanted * running[0].most_gain // page + 1)
    if min([cache.growth_pages(kind, cache.available_size(kind)) for kind in kinds]) >= most:
        return wanted
    # several steps use free pages only where a victim is copied before the next step (write_back)
    # or where pages that leave a window do not count
    waits = cache.tree.demotes or cache.device.is_shared
    waiting = [kind for kind in kinds if waits or kind in cache.tree.kinds.aux]
    if waiting and not are_free(cache, waiting, running, wanted):
        wanted = steps_in_page(running, page, wanted)
    room = min(cache.growth_pages(kind, cache.room(kind)) for kind in kinds)
    while wanted and pages_for(running, page, wanted) > room:
        wanted //= 2
    return wanted


def pages_for(running: Sequence[RequestState], page_size: int, num_steps: int) -> int:
    if running and running[0].gains:
        counts = [-(-req.reach(num_steps) // page_size) - req.sequence.num_pages for req in running]
    else:
        ahead = num_steps + page_size - 1
        counts = [(req.kv_len + ahead) // page_size - req.sequence.num_pages for req in running]
    return sum([count for count in counts if count > 0])


def steps_in_page(running: Sequence[RequestState], page_size: int, wanted: int) -> int:
    """Return the number of decode steps until the first of the running requests fills a page.

    The result is at least 1 and at most `wanted`.
    """
    left = min([-req.kv_len % page_size for req in running]) // running[0].most_gain
    return max(min(wanted, left), 1)


def steps_in_free_pages(
    cache: PrefixCache, running: Sequence[RequestState], wanted: int, *, spare: int = 0
) -> int:
    """Return how many decode steps the running requests can take in free pages, without eviction.

    `spare` pages stay free. The result is at least 1, even if the first step must evict, and at
    most `wanted`.
    """
    page = cache.page_size
    paged = cache.tree.kinds.paged
    free = min([cache.growth_pages(kind, cache.available_size(kind)) for kind in paged])
    free -= spare
    if pages_for(running, page, wanted) <= free:
        return wanted
    few = bisect_right(range(1, wanted), free, key=lambda steps: pages_for(running, page, steps))
    return max(few, 1)


def are_free(
    cache: PrefixCache, kinds: Iterable[int], running: Sequence[RequestState], num_steps: int
) -> bool:
    """Return whether decode steps find pages of all `kinds` without eviction."""
    count = pages_for(running, cache.page_size, num_steps)
    free = min([cache.growth_pages(kind, cache.available_size(kind)) for kind in kinds])
    return count <= free
