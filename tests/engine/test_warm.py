"""The pages that a first pass over a workload leaves in storage."""

from typing import Any

import numpy as np
import pytest

from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.keys import Numbers
from hicache.cache.tree.radix_tree import RadixTree
from hicache.engine.deployment import deploy
from hicache.engine.simulated_runtime import make_runtime
from hicache.engine.warm import warm_storage, warm_storages
from hicache.observe.history import PageRegistry, Stored
from hicache.request import TokenSpans
from hicache.runs.schema import config_of
from tests.cache.small import named_kinds
from tests.scheduler.world import fresh, request_of

PAGE = 4


class RecordingStore:
    """A storage that records the keys written."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def write(self, keys: list[bytes]) -> int:
        assert {type(key) for key in keys} <= {bytes}
        self.keys |= set(keys)
        return 0


@pytest.mark.parametrize(
    ("lengths", "window_pages", "has_states", "stored"),
    [
        # all pages of prompt and answer but for the answer's last token
        ((20, 12), 0, False, (7, [], [])),
        ((20, 13), 0, False, (8, [], [])),
        ((20, 1), 0, False, (5, [], [])),
        # windows and states at both ends
        ((21, 12), 2, False, (8, [3, 4, 6, 7], [])),
        ((8, 1), 9, False, (2, [0, 1], [])),  # a window longer than the prompt
        ((21, 12), 0, True, (8, [], [4, 7])),
        # prompts and requests of a page, and shorter
        ((3, 6), 1, True, (2, [1], [1])),
        ((4, 1), 0, True, (1, [], [0])),
        ((2, 1), 1, True, (0, [], [])),
    ],
)
@pytest.mark.parametrize("namespace", ["", "tenant"])
def test_storage_has_all_full_pages_and_windows_and_states_where_prompt_and_answer_end(
    lengths: tuple[int, int], window_pages: int, stored: Any, namespace: str, *, has_states: bool
) -> None:
    (prompt_len, output_len), (full, windows, states) = lengths, stored
    tokens = range(prompt_len + output_len)
    request = request_of(0, tokens[:prompt_len], tokens[prompt_len:], namespace=namespace)
    kinds = named_kinds(PAGE, window_len=window_pages * PAGE, has_states=has_states)
    store, tree = RecordingStore(), RadixTree(kinds=kinds)
    warm_storage(store, [request], tree)
    assert not tree.roots
    digests = page_digests(chain_seed(namespace), np.arange(99, dtype="<i4").tobytes(), 4 * PAGE)
    pages = ((b"f", range(full)), (b"s", windows), (b"m", states))
    assert store.keys == {digests[page] + tag for tag, at in pages for page in at}


def test_registry_knows_the_stored_pages_and_that_all_were_seen() -> None:
    pages = {0: TokenSpans(np.array([0], np.int32), np.array([8], np.int32))}
    registry = PageRegistry(pages)
    kinds = named_kinds(PAGE, window_len=2 * PAGE, has_states=True)
    registry.warm([fresh(0, 20, 13)], Numbers(pages), kinds)
    assert registry.is_seen.all()
    stored = [np.flatnonzero(each == Stored.written).tolist() for each in registry.stored]
    assert stored == [[*range(8)], [3, 4, 6, 7], [4, 7]]


def test_a_run_without_storage_cannot_start_with_a_warm_one():
    config = config_of("model=llama3_8b", "storage=none", "workload=chat")
    runtime = make_runtime(config, deploy(config))
    with pytest.raises(ValueError, match=r"storage\.kind=none and executor\.kind=simulated"):
        warm_storages(config, runtime, [], RadixTree(kinds=named_kinds(PAGE)))
