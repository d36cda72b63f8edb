"""The hits of all cache sizes from one pass, against caches that are filled block by block."""

import gzip
import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from hicache.request import Request, TokenSpans
from hicache.workload.reuse import Reuse, reuse

BLOCK = 4
# tokens that hit in the last half of Mooncake's conversation trace, by blocks of 512 tokens in the
# cache, for LRU and Belady: from `kvcache-simulator run --model llama-3.1-8b --block-size 512
# --policies lru,optimal` of kvcache-simulator 0.1.3
PEER = {
    1_024: (3_194_814, 13_516_455),
    2_048: (3_833_192, 18_226_289),
    4_096: (5_935_037, 23_452_732),
    8_192: (12_781_765, 27_038_068),
    16_384: (18_940_960, 27_038_068),
    32_768: (24_161_208, 27_038_068),
}
Paths = list[list[int]]


def requests_of(paths: Paths, block: int) -> list[Request]:
    """Return a request per path of blocks of `block` tokens; all blocks may hit, its answer not."""
    return [
        Request(
            id=number,
            session_id=number,
            arrival_ns=number,
            prompt=TokenSpans(
                np.array([*(block * each for each in path), 1], np.int32),
                np.array([*[block] * len(path), 1], np.int32),
            ),
            output=TokenSpans(np.array([2], np.int32), np.array([1], np.int32)),
        )
        for number, path in enumerate(paths)
    ]


def random_paths(seed: int) -> Paths:
    """Return the block ids of 120 requests, which extend random prefixes of earlier ones."""
    rng = np.random.default_rng(seed)
    sessions: Paths = [[each] for each in range(3)]
    paths = []
    for number in range(120):
        session = list(sessions[rng.integers(len(sessions))])
        keep = int(rng.integers(1, len(session) + 1))
        new = range(1_000 + 10 * number, 1_000 + 10 * number + int(rng.integers(0, 6)))
        paths.append([*session[:keep], *new])
        sessions.append(paths[-1])
    return paths


def prefixes(path: list[int]) -> list[tuple[int, ...]]:
    return [tuple(path[: end + 1]) for end in range(len(path))]


def lru_hits(paths: Paths, capacity: int) -> list[int]:
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for path in map(prefixes, paths):
        hits.append(next((n for n, each in enumerate(path) if each not in held), len(path)))
        for each in reversed(path):  # the root is the newest
            held[each] = None
            held.move_to_end(each)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def belady_hits(paths: Paths, capacity: int) -> list[int]:
    places: dict[tuple[int, ...], list[int]] = {}
    for number, path in enumerate(paths):
        for each in prefixes(path):
            places.setdefault(each, []).append(number)
    held: set[tuple[int, ...]] = set()
    hits = []
    for number, path in enumerate(paths):
        hits.append(sum(each in held for each in prefixes(path)))
        uses = {
            each: next((use for use in places[each] if use > number), len(paths))
            for each in {*held, *prefixes(path)}
        }
        held = set(sorted(uses, key=lambda each: (uses[each], len(each)))[:capacity])
    return hits


@pytest.mark.parametrize("seed", range(4))
def test_hits_from_one_pass_equal_those_of_lru_and_belady_caches_of_each_size(seed: int) -> None:
    paths = random_paths(seed)
    used = reuse(requests_of(paths, BLOCK), BLOCK)
    for capacity in (0, 1, 2, 5, 17, 60, used.full_pages - 1, used.full_pages, 10_000):
        assert used.lru(capacity).tolist() == lru_hits(paths, capacity)
        assert used.belady(capacity).tolist() == belady_hits(paths, capacity)
    assert used.lru(used.full_pages - 1).sum() < used.lru(used.full_pages).sum()
    assert used.lru(used.full_pages).sum() == used.lru(10_000).sum()


def test_the_last_token_of_a_prompt_never_hits_and_that_of_an_answer_is_not_kept() -> None:
    def request(number: int, num_prompt: int, num_answer: int) -> Request:
        spans = [
            TokenSpans(np.array([start], np.int32), np.array([count], np.int32))
            for start, count in ((0, num_prompt), (num_prompt, num_answer))
        ]
        return Request(id=number, session_id=0, arrival_ns=number, prompt=spans[0], output=spans[1])

    # 16 tokens: the fourth page is kept only if a token follows it
    for num_answer, hits in ((8, 3), (9, 4)):
        used = reuse([request(0, 8, num_answer), request(1, 17, 1)], BLOCK)
        assert used.lru(100).tolist() == used.belady(100).tolist() == [0, hits]
    assert reuse([request(0, 8, 9), request(1, 16, 1)], BLOCK).lru(100).tolist() == [0, 3]


@pytest.fixture(scope="module")
def conversation() -> tuple[Reuse, np.ndarray]:
    path = Path(os.environ.get("HICACHE_DATA", "")) / "mooncake_conversation.jsonl.gz"
    if not path.is_file():
        pytest.skip("HICACHE_DATA names no folder with the trace")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    requests = requests_of([row["hash_ids"] for row in rows], 512)
    return reuse(requests, 512), np.array([row["input_length"] for row in rows])


@pytest.mark.parametrize("capacity", PEER)
def test_hits_of_a_real_trace_equal_those_of_kvcache_simulator_to_the_token(
    capacity: int, conversation: tuple[Reuse, np.ndarray]
) -> None:
    used, prompt_lens = conversation
    half = len(prompt_lens) // 2
    found = [
        np.minimum(512 * hits, prompt_lens)[half:].sum()
        for hits in (used.lru(capacity), used.belady(capacity))
    ]
    assert tuple(found) == PEER[capacity]
