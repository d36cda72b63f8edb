"""What a first pass over a workload leaves in storage, for runs that begin with it there."""

from collections.abc import Iterable

from hicache.cache.tree.census import Census, Stored
from hicache.cache.tree.keys import PageNames, keys, make_root
from hicache.cache.tree.node import FULL, MAMBA, SWA
from hicache.cache.tree.sequence import Sequence
from hicache.request import Request
from hicache.storage.base import Storage


def warm_storage(
    storage: Storage,
    requests: Iterable[Request],
    *,
    names: PageNames,
    page_size: int,
    window_pages: int,
    has_states: bool,
) -> None:
    """Store every page of every prompt and answer, and windows and states where both end.

    Keys stand for pages, as in any simulated run. O(tokens).
    """
    for request in requests:
        # the last answer token is never fed back, so no KV of it exists
        lengths = (request.prompt_len, request.prompt_len + request.output_len - 1)
        sequence = Sequence(names.tokens(request))
        pages = names.of_span(make_root(request.namespace), sequence, lengths[1] // page_size)
        stored = keys(pages, FULL)
        for end in {length // page_size for length in lengths} - {0}:
            stored += keys(pages[max(end - window_pages, 0) : end], SWA) if window_pages else []
            stored += keys(pages[end - 1 : end], MAMBA) if has_states else []
        storage.write(stored, [memoryview(key) for key in stored])


def warm_census(
    census: Census,
    requests: Iterable[Request],
    *,
    page_size: int,
    window_pages: int,
    has_states: bool,
) -> None:
    """Take down that all of this was seen, and what of it storage has."""
    for request in requests:
        numbers = census.numbers_of(request)
        census.is_seen[numbers] = True
        census.stored[FULL][numbers] = Stored.written
        for end in {request.prompt_len // page_size, len(numbers)} - {0}:
            census.stored[SWA][numbers[max(end - window_pages, 0) : end]] = Stored.written
            if has_states:
                census.stored[MAMBA][numbers[end - 1]] = Stored.written
