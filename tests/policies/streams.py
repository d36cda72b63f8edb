"""Streams of 10,000 accesses to single pages, for this cache and for others."""

from random import Random

ACCESSES = 10_000
CAPACITY = 200  # pages; each stream has at least 400 different ones


def zipf() -> list[int]:
    """Independent accesses; the r-th of 2,000 pages is accessed in proportion to r**-0.9."""
    rng = Random(1)
    weights = [rank**-0.9 for rank in range(1, 2_001)]
    return rng.choices(range(2_000), weights, k=ACCESSES)


def scans() -> list[int]:
    """Zipf accesses to 600 pages, with a scan of 150 new pages after each 350 of them."""
    rng = Random(2)
    weights = [rank**-0.8 for rank in range(1, 601)]
    stream: list[int] = []
    while len(stream) < ACCESSES:
        stream += rng.choices(range(600), weights, k=350)
        stream += range(10_000 + len(stream), 10_150 + len(stream))
    return stream[:ACCESSES]


def phases() -> list[int]:
    """Accesses to pages that return after few or hundreds of others; the popular pages change."""
    rng = Random(3)
    stream: list[int] = []
    for number in range(ACCESSES):
        first = number // 2_500 * 300
        draw = rng.random()
        if draw < 0.3 and stream:
            stream.append(stream[-rng.randint(1, min(len(stream), 600))])
        elif draw < 0.6:
            stream.append(first + number % 250)
        else:
            stream.append(first + int(600 * rng.random() ** 3))
    return stream


STREAMS = {"zipf": zipf, "scans": scans, "phases": phases}
