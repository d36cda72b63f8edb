"""Warm storage: what a first pass over a workload leaves there, for runs that begin with it."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from hicache.cache.kinds import Kinds
from hicache.cache.tree.keys import keys
from hicache.cache.tree.node import make_root
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import ExperimentConfig
from hicache.engine.ports import Runtime
from hicache.engine.simulated_runtime import SimulatedRuntime
from hicache.executor.simulated.stores import KeyStore, StandIns
from hicache.request import Request


def warm_storages(
    config: ExperimentConfig, runtime: Runtime, requests: Items[Request], tree: RadixTree
) -> None:
    """Write to each storage of a simulated run what `warm_storage` writes.

    Raises:
        ValueError: the run is not simulated, or has no storage.
    """
    if not isinstance(runtime, SimulatedRuntime) or not runtime.has_storage:
        raise ValueError(
            "workload.start=warm_storage needs a storage engine and executor.kind=simulated, got "
            f"storage.kind={config.storage.kind} and executor.kind={config.executor.kind}"
        )
    unguarded = [runtime.beside(StandIns(each.engine)) for each in runtime.storages]
    for store in unguarded or runtime.stores:
        warm_storage(store, requests, tree)


def warm_storage(storage: KeyStore, requests: Iterable[Request], tree: RadixTree) -> None:
    """Write the keys of all pages of the requests' prompts and answers to `storage`.

    This includes the sliding windows and Mamba states at the end of each prompt and answer. Page
    contents are not stored, because a simulated run does not need them. `tree` only serves to
    compute the keys.
    """
    names = tree.names
    for request in requests:
        num_pages = tree.num_pages(request.prompt_len + request.output_len)
        sequence = Sequence(names.tokens(request))
        pages = names.of_span(make_root(request.namespace), sequence, num_pages)
        left = pages_left(request, tree.kinds, tree.overlap)
        storage.write([key for kind, at in left for key in keys(pages[at], kind)])


def pages_left(request: Request, kinds: Kinds, overlap: int) -> Iterator[tuple[int, slice]]:
    # the model never reads the last answer token, so it has no KV
    lengths = (request.prompt_len, request.prompt_len + request.output_len - 1)
    ends = [max(length - overlap, 0) // kinds.page_size for length in lengths]
    yield kinds.numbers[0], slice(ends[1])
    for end in {*ends} - {0}:
        for kind, window in kinds.extents:
            yield kind, slice(max(window.first(end), 0), end)
