"""Digests of pages and names of namespaces."""

import pytest

from hicache.storage.contract import key, payload
from hicache.storage.digest import PAGE_DIGEST_BYTES, namespace_name, page_digest, page_hasher


def test_a_digest_depends_on_namespace_key_length_and_bytes():
    page = payload(key(1))
    digests = [
        page_digest(b"a", key(1), page),
        page_digest(b"b", key(1), page),
        page_digest(b"a", key(2), page),
        page_digest(b"a", key(1), page[:-1]),
        page_digest(b"a", key(1), payload(key(2))),
        page_digest(b"a", key(1), memoryview(b"")),
        page_digest(b"a", key(1), memoryview(bytes(1))),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {PAGE_DIGEST_BYTES}


def test_digests_and_names_are_those_of_stores_of_earlier_versions():
    digest = page_digest(b"test", key(1), payload(key(1)))
    assert digest.hex() == "84a516da98cffb0fbc549ef3a2365f56"
    assert namespace_name("test") == "44a8995dd50b6657a037a7839304535b"


@pytest.mark.parametrize("part_bytes", [1000, 8192])
def test_a_page_hashed_in_parts_has_the_digest_of_the_whole(part_bytes):
    page = payload(key(1))
    hasher = page_hasher(b"a", key(1), page.nbytes)
    for start in range(0, page.nbytes, part_bytes):
        hasher.update(page[start : start + part_bytes])
    assert hasher.digest() == page_digest(b"a", key(1), page)


def test_namespaces_have_different_names_of_one_length():
    names = {namespace_name(text) for text in ("", "a", "b", "a/b", "ä" * 1000)}
    assert sorted(map(len, names)) == [32] * 5
