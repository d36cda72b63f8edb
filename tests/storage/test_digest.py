"""A page's digest tells where it belongs, and a namespace's name is its own."""

import pytest
from storage_pages import key, payload

from hicache.storage.digest import PAGE_DIGEST_BYTES, namespace_name, page_digest, page_hasher


def test_a_digest_follows_from_all_that_a_page_is() -> None:
    page = payload(key(1))
    digests = [
        page_digest(b"a", key(1), page),
        page_digest(b"b", key(1), page),
        page_digest(b"a", key(2), page),
        page_digest(b"a", key(1), page[:-1]),
        page_digest(b"a", key(1), payload(key(2))),
        # nor is it that of a longer page whose end is cut off
        page_digest(b"a", key(1), memoryview(b"")),
        page_digest(b"a", key(1), memoryview(bytes(1))),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {PAGE_DIGEST_BYTES}


def test_digests_of_pages_that_were_stored_long_ago_are_known() -> None:
    digest = page_digest(b"test", key(1), payload(key(1)))
    assert digest.hex() == "84a516da98cffb0fbc549ef3a2365f56"


@pytest.mark.parametrize("part_bytes", [1, 1000, 8192])
def test_a_page_hashed_in_parts_has_the_digest_of_the_whole(part_bytes: int) -> None:
    page = payload(key(1))
    hasher = page_hasher(b"a", key(1), page.nbytes)
    for start in range(0, page.nbytes, part_bytes):
        hasher.update(page[start : start + part_bytes])
    assert hasher.digest() == page_digest(b"a", key(1), page)


def test_names_of_namespaces_have_one_length_and_differ() -> None:
    names = {namespace_name(text) for text in ("", "a", "b", "a/b", "ä" * 1000)}
    assert len(names) == 5
    assert {len(name) for name in names} == {32}
    # directories of earlier runs are found again
    assert namespace_name("test") == "44a8995dd50b6657a037a7839304535b"
