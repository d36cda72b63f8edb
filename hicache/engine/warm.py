"""What a first pass over a workload leaves in storage, for runs that begin with it there."""

from collections.abc import Iterable, Iterator

from hicache.cache.kinds import Kinds
from hicache.cache.tree.keys import keys, make_root
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
        num_pages = (request.prompt_len + request.output_len) // page_size
        sequence = Sequence(names.tokens(request))
        pages = names.of_span(make_root(request.namespace), sequence, num_pages)
        storage.write(
            [key for kind, at in pages_left(request, tree.kinds) for key in keys(pages[at], kind)]
        )


def pages_left(request: Request, kinds: Kinds) -> Iterator[tuple[int, slice]]:
    """Yield each kind, and the pages of the request that are left of it."""
    # the last answer token is never fed back, so no KV of it exists
    lengths = (request.prompt_len, request.prompt_len + request.output_len - 1)
    yield kinds.numbers[0], slice(lengths[1] // kinds.page_size)
    for end in {length // kinds.page_size for length in lengths} - {0}:
        for kind, pages in kinds.extents:
            yield kind, slice(max(end - pages, 0), end)
