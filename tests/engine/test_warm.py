"""What a first pass over a workload leaves in storage."""

import numpy as np
import pytest

from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.keys import Numbers
from hicache.cache.tree.radix_tree import RadixTree
from hicache.engine.warm import warm_storage
from hicache.observe.history import PageRegistry, Stored
from hicache.request import Request, TokenSpans
from tests.cache.small import named_kinds

PAGE = 4


class Kept:
    """A storage that remembers keys."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def write(self, keys: list[bytes]) -> int:
        assert {type(key) for key in keys} <= {bytes}
        self.keys += keys
        return 0


def spans(first: int, count: int) -> TokenSpans:
    return TokenSpans(np.array([first], np.int32), np.array([count], np.int32))


def warmed(
    prompt_len: int,
    output_len: int,
    *,
    window_pages: int = 0,
    has_states: bool = False,
    namespace: str = "",
) -> Kept:
    kept = Kept()
    request = Request(
        id=0,
        session_id=0,
        arrival_ns=0,
        prompt=spans(0, prompt_len),
        output=spans(prompt_len, output_len),
        namespace=namespace,
    )
    kinds = named_kinds(PAGE, window_len=window_pages * PAGE, has_states=has_states)
    tree = RadixTree(kinds=kinds)
    warm_storage(kept, [request], tree)  # type: ignore[arg-type]
    assert not tree.roots
    return kept


def keys(tag: bytes, *pages: int, namespace: str = "") -> set[bytes]:
    """The keys of these pages of tokens 0, 1, 2, ..."""
    tokens = np.arange(1000, dtype="<i4").tobytes()
    digests = page_digests(chain_seed(namespace), tokens, 4 * PAGE)
    return {digests[page] + tag for page in pages}


@pytest.mark.parametrize(("output_len", "num_pages"), [(12, 7), (13, 8), (1, 5)])
def test_pages_of_prompt_and_answer_but_for_its_last_token_are_kept(
    output_len: int, num_pages: int
) -> None:
    assert set(warmed(20, output_len).keys) == keys(b"f", *range(num_pages))


def test_windows_are_kept_where_prompt_and_answer_end() -> None:
    kept = warmed(21, 12, window_pages=2)
    assert set(kept.keys) == keys(b"f", *range(8)) | keys(b"s", 3, 4, 6, 7)


def test_a_window_longer_than_the_prompt_is_all_of_it() -> None:
    kept = warmed(8, 1, window_pages=9)
    assert set(kept.keys) == keys(b"f", 0, 1) | keys(b"s", 0, 1)


def test_states_are_kept_where_prompt_and_answer_end() -> None:
    kept = warmed(21, 12, has_states=True)
    assert set(kept.keys) == keys(b"f", *range(8)) | keys(b"m", 4, 7)


def test_a_prompt_shorter_than_a_page_leaves_nothing_at_its_end() -> None:
    kept = warmed(3, 6, window_pages=1, has_states=True)
    assert set(kept.keys) == keys(b"f", 0, 1) | keys(b"s", 1) | keys(b"m", 1)


def test_a_namespace_has_pages_of_its_own() -> None:
    assert set(warmed(8, 1, namespace="tenant").keys) == keys(b"f", 0, 1, namespace="tenant")


def test_a_request_shorter_than_a_page_leaves_nothing() -> None:
    assert warmed(2, 1, window_pages=1, has_states=True).keys == []


def test_a_prompt_of_one_page_leaves_its_state() -> None:
    assert set(warmed(4, 1, has_states=True).keys) == keys(b"f", 0) | keys(b"m", 0)


def test_what_storage_has_is_known_to_the_registry_and_all_of_it_was_seen() -> None:
    request = Request(id=0, session_id=0, arrival_ns=0, prompt=spans(0, 20), output=spans(20, 13))
    pages = {0: spans(0, 8)}
    registry = PageRegistry(pages)
    registry.warm(
        [request], Numbers(pages), named_kinds(PAGE, window_len=2 * PAGE, has_states=True)
    )
    assert registry.is_seen.all()
    stored = [np.flatnonzero(each == Stored.written).tolist() for each in registry.stored]
    assert stored == [[*range(8)], [3, 4, 6, 7], [4, 7]]
