"""What a first pass over a workload leaves in storage, for runs that begin with it there."""

from collections.abc import Iterable

from hicache.cache.tree.census import Census, Stored
from hicache.cache.tree.keys import COMPONENT_TAGS, chain_seed, page_digests
from hicache.cache.tree.node import FULL, MAMBA, SWA
from hicache.cache.tree.page_numbers import PageNumbering
from hicache.request import TOKEN_BYTES, Request
from hicache.storage.base import Storage


def warm_storage(
    storage: Storage,
    requests: Iterable[Request],
    *,
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
        tokens = request.prompt.to_bytes() + request.output.to_bytes()
        digests = page_digests(
            chain_seed(request.namespace),
            tokens[: lengths[1] * TOKEN_BYTES],
            page_size * TOKEN_BYTES,
        )
        keys = [digest + COMPONENT_TAGS[FULL] for digest in digests]
        for end in {length // page_size for length in lengths} - {0}:
            window = digests[max(end - window_pages, 0) : end] if window_pages else []
            keys += [digest + COMPONENT_TAGS[SWA] for digest in window]
            if has_states:
                keys.append(digests[end - 1] + COMPONENT_TAGS[MAMBA])
        storage.write(keys, [memoryview(key) for key in keys])


def warm_census(
    census: Census,
    numbering: PageNumbering,
    requests: Iterable[Request],
    *,
    window_pages: int,
    has_states: bool,
) -> None:
    """Take down that all of this was seen, and what of it storage has. O(tokens)."""
    for request in requests:
        numbers = numbering.of(request, request.prompt.to_bytes() + request.output.to_bytes())
        census.is_seen[numbers] = True
        census.stored[FULL][numbers] = Stored.written
        for end in {request.prompt_len // numbering.page_size, len(numbers)} - {0}:
            census.stored[SWA][numbers[max(end - window_pages, 0) : end]] = Stored.written
            if has_states:
                census.stored[MAMBA][numbers[end - 1]] = Stored.written
