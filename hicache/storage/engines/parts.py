"""Splits a batch of pages into parts that one message or one staging buffer can hold."""

from collections.abc import Iterator, Sequence


def parts(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yield the parts of a batch, in order; each has at most `most` bytes in sum.

    `sizes` are the bytes of the pages. A page that is larger than `most` is a part of its own.
    """
    start = num_bytes = 0
    for index, size in enumerate(sizes):
        if index > start and num_bytes + size > most:
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += size
    if sizes:
        yield slice(start, len(sizes))
