"""How many decode steps may be taken at once: as many as there are surely pages for."""

from bisect import bisect_right
from collections.abc import Sequence

from hicache.cache.prefix_cache import PrefixCache
from hicache.config import WritePolicy
from hicache.scheduler.request_state import RequestState


def steps_with_pages(cache: PrefixCache, running: Sequence[RequestState], wanted: int) -> int:
    """How many steps, at most `wanted`, the pools have pages for without looking again.

    A victim under write_back is saved before the next step, and pages that leave a window
    meanwhile are not counted: so none are taken for many steps at once.
    """
    page, kinds = cache.page_size, cache.tree.kinds.paged
    most = len(running) * (wanted // page + 1)  # whatever the lengths are
    if min([cache.available_size(kind) for kind in kinds]) >= most * page:
        return wanted
    for kind in kinds:
        if (
            kind not in cache.tree.kinds.aux
            and cache.knobs.write_policy is not WritePolicy.write_back
        ):
            continue
        if not _are_free(cache, kind, running, wanted):
            wanted = steps_in_page(running, page, wanted)
    room = min(cache.room(kind) // page for kind in kinds)
    while wanted and pages_for(running, page, wanted) > room:
        wanted //= 2
    return wanted


def must_evict(cache: PrefixCache, running: Sequence[RequestState]) -> bool:
    """Whether the next step takes pages that are not free."""
    return not all(_are_free(cache, kind, running, 1) for kind in cache.tree.kinds.paged)


def pages_for(running: Sequence[RequestState], page_size: int, num_steps: int) -> int:
    """Pages of each kind that so many steps take."""
    counts = [-(-(req.kv_len + num_steps) // page_size) - req.sequence.num_pages for req in running]
    return sum([count for count in counts if count > 0])


def steps_in_page(running: Sequence[RequestState], page_size: int, wanted: int) -> int:
    """How many steps, at most `wanted` and at least one, until some request has filled a page."""
    left = min([-req.kv_len % page_size for req in running])
    return max(min(wanted, left), 1)


def steps_in_free_pages(cache: PrefixCache, running: Sequence[RequestState], wanted: int) -> int:
    """How many steps, at most `wanted` and at least one, that surely evict nothing."""
    page = cache.page_size
    free = min([cache.available_size(kind) for kind in cache.tree.kinds.paged]) // page
    if pages_for(running, page, wanted) <= free:
        return wanted
    few = bisect_right(range(1, wanted), free, key=lambda steps: pages_for(running, page, steps))
    return max(few, 1)


def _are_free(
    cache: PrefixCache, kind: int, running: Sequence[RequestState], num_steps: int
) -> bool:
    page = cache.page_size
    return pages_for(running, page, num_steps) <= cache.available_size(kind) // page
