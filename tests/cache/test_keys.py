"""Names of pages: numbers in a simulated workload, digests otherwise."""

from types import SimpleNamespace

import numpy as np
import pytest

from hicache.cache.tree.keys import KIND_STEP, NUMBER_BYTES, Numbers
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig
from hicache.request import TokenSpans, byte_places
from hicache.workload.runs import to_spans
from tests.cache.small import PAGE, make_cache, prefetcher_of, tokens_of


def test_byte_offsets_of_page_numbers_are_right_beyond_two_gigabytes():
    span = TokenSpans(np.zeros(1, np.int32), np.full(1, 1 << 20, np.int32))
    places = byte_places(dict.fromkeys(range(3000), span), NUMBER_BYTES)  # some 2**31.5 pages
    assert places == {each: (each << 22, (each + 1) << 22) for each in range(3000)}


def test_a_request_of_several_runs_of_pages_gets_the_numbers_of_all_its_pages():
    runs = {0: [(0, 3), (7, 2)], 1: [(5, 1)], 2: [], 3: [(1, 2), (0, 1), (9, 1)]}
    names = Numbers({each: to_spans(pairs) for each, pairs in runs.items()})
    for each, pairs in runs.items():
        wanted = [first + step for first, count in pairs for step in range(count)]
        numbers = names.tokens(SimpleNamespace(id=each))  # type: ignore[arg-type]
        assert memoryview(numbers).cast("i").tolist() == wanted


def test_a_workload_of_too_many_pages_is_rejected():
    few = TokenSpans(np.full(1, KIND_STEP - 1, np.int32), np.ones(1, np.int32))
    Numbers({0: few})
    with pytest.raises(ValueError, match="pages at most"):
        Numbers({0: TokenSpans(few.starts + 1, few.counts)})


@pytest.mark.parametrize(
    ("start", "end", "known"),
    [(2, 5, [b"a", b"b", b"c"]), (3, 4, [b"b"]), (2, 2, []), (1, 3, None), (3, 6, None)],
)
def test_a_sequence_knows_the_digests_of_the_pages_that_storage_was_asked_for(start, end, known):
    sequence = Sequence(tokens_of(24))
    sequence.digests, sequence.digests_start = [b"a", b"b", b"c"], 2
    assert sequence.known_digests(start, end) == known


def test_new_nodes_reuse_the_digests_with_which_storage_was_queried():
    cache = make_cache(device=(9, 0, 0), host=(9, 0, 0), storage_queue_bytes=0)
    sequence, _ = cache.begin(17)
    match = cache.match(sequence, 17)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=PAGE))
    prefetch = prefetcher.prefetch_from_storage(0, sequence, match, 17, 0)
    assert prefetch is not None
    assert cache.extend(sequence, 17)
    cache.publish(sequence, 4)
    assert cache.node_at(4).digests == prefetch.names
    assert len(prefetch.names) == 4
