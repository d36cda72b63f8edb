"""Checksums of stored pages, and names for namespaces."""

from hashlib import blake2b

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

PAGE_DIGEST_BYTES = 16


def page_hasher(namespace: bytes, key: bytes, length: int) -> xxh3_128:
    """XXH3 (128 bits) of a page, seeded by where it belongs and how many bytes it has.

    A page that is whole but lies under another key, in another namespace, or was cut short has
    another digest. Hashing runs at memory speed, and above it while the bytes are in cache.
    """
    return xxh3_128(seed=_seed(namespace, key, length))


def page_digest(namespace: bytes, key: bytes, payload: memoryview) -> bytes:
    """The digest of a whole page, `PAGE_DIGEST_BYTES` long."""
    return xxh3_128_digest(payload, seed=_seed(namespace, key, payload.nbytes))


def _seed(namespace: bytes, key: bytes, length: int) -> int:
    return xxh3_64_intdigest(namespace + key + length.to_bytes(8, "little"))


def namespace_name(namespace: str) -> str:
    """A name of fixed length for directories and remote keys: 16 bytes of BLAKE2b, in hex."""
    return blake2b(namespace.encode(), digest_size=16).hexdigest()
