"""What a first pass over a workload leaves in storage, for runs that begin with it there."""

from collections.abc import Iterable

from hicache.cache.tree.keys import keys, make_root
from hicache.cache.tree.node import FULL, MAMBA, SWA
from hicache.cache.tree.page_registry import Stored
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.executor.simulated.stores import KeyStore
from hicache.request import Request


def warm_storage(storage: KeyStore, requests: Iterable[Request], tree: RadixTree) -> None:
    """Store every page of every prompt and answer, and windows and states where both end.

    Keys stand for pages, as in any simulated run; the tree, which stays as it is, knows which.
    """
    names, page_size = tree.names, tree.page_size
    for request in requests:
        # the last answer token is never fed back, so no KV of it exists
        lengths = (request.prompt_len, request.prompt_len + request.output_len - 1)
        sequence = Sequence(names.tokens(request))
        pages = names.of_span(make_root(request.namespace), sequence, lengths[1] // page_size)
        stored = [*keys(pages, FULL)]
        for end in {length // page_size for length in lengths} - {0}:
            if tree.has_swa:
                stored += keys(pages[max(end - tree.window_pages, 0) : end], SWA)
            if tree.has_states:
                stored += keys(pages[end - 1 : end], MAMBA)
        storage.write(stored)


def warm_registry(requests: Iterable[Request], tree: RadixTree) -> None:
    """Take down that all of this was seen, and what of it storage has."""
    registry = tree.history.registry
    for request in requests:
        numbers = registry.numbers_of(request)
        registry.is_seen[numbers] = True
        registry.stored[FULL][numbers] = Stored.written
        for end in {request.prompt_len // tree.page_size, len(numbers)} - {0}:
            if tree.has_swa:
                window = numbers[max(end - tree.window_pages, 0) : end]
                registry.stored[SWA][window] = Stored.written
            if tree.has_states:
                registry.stored[MAMBA][numbers[end - 1]] = Stored.written
