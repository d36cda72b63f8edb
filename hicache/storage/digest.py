"""Checksums of stored pages, and fixed-length names for namespaces."""

from hashlib import blake2b

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

PAGE_DIGEST_BYTES = 16


def page_hasher(namespace: bytes, key: bytes, length: int) -> xxh3_128:
    """Return an XXH3 hasher (128 bits) for the bytes of one stored page.

    The hasher is seeded with `namespace`, `key` and `length` (in bytes). So the digest of a page is
    wrong if the page lies under another key or namespace, or is cut short.
    """
    return xxh3_128(seed=_seed(namespace, key, length))


def page_digest(namespace: bytes, key: bytes, payload: memoryview) -> bytes:
    return xxh3_128_digest(payload, seed=_seed(namespace, key, payload.nbytes))


def _seed(namespace: bytes, key: bytes, length: int) -> int:
    return xxh3_64_intdigest(namespace + key + length.to_bytes(8, "little"))


def namespace_name(namespace: str) -> str:
    return blake2b(namespace.encode(), digest_size=16).hexdigest()
