"""Exclusive tiers have the same hits as a brute-force model of two exclusive LRU tiers."""

from collections.abc import Iterable
from random import Random

import numpy as np
import pytest

from hicache.cache.tree.sequence import Sequence
from hicache.observe import invariants
from tests.cache.small import PAGE, make_cache

Prompt = tuple[int, ...]  # its pages; the same number after the same prefix is the same page


class BruteForce:
    """Two exclusive LRU tiers of single pages; each victim is found by a search over all pages.

    A page is named by its prefix. A page leaves the device for the host, and the host for good. It
    may leave the device once no page behind it is on the device, and the host once no page behind
    it is anywhere.
    """

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.sizes = device_pages, host_pages
        self.device: dict[Prompt, int] = {}  # by page: number of the last request that used it
        self.host: dict[Prompt, int] = {}
        self.hits = [0, 0]  # pages, on device and host

    def serve(self, number: int, prompt: Prompt) -> None:
        path = [prompt[: end + 1] for end in range(len(prompt))]
        on_device = [page for page in path if page in self.device]
        on_host = []
        for page in path[len(on_device) :]:
            if page not in self.host:
                break
            on_host.append(page)
        self.hits[0] += len(on_device)
        self.hits[1] += len(on_host)
        for page in on_device:
            self.device[page] = number
        for page in on_host:
            self.host[page] = number
        busy = {*on_device, *on_host}
        self.make_room(len(on_host), busy)
        for page in on_host:  # the host's copy stays until the copy to the device is done
            del self.host[page]
            self.device[page] = number
        self.make_room(len(path) - len(busy), busy)
        self.device |= dict.fromkeys(path[len(busy) :], number)

    def make_room(self, count: int, busy: set[Prompt]) -> None:
        while len(self.device) + count > self.sizes[0]:
            victim = oldest(self.device, {page[:-1] for page in self.device} | busy)
            used = self.device.pop(victim)
            while len(self.host) >= self.sizes[1]:
                inner = {page[:-1] for page in (*self.device, *self.host)}
                del self.host[oldest(self.host, inner | busy | {victim})]
            self.host[victim] = used


def oldest(tier: dict[Prompt, int], stays: set[Prompt]) -> Prompt:
    return min((page for page in tier if page not in stays), key=lambda p: (tier[p], -len(p)))


def hits_of(prompts: Iterable[Prompt], sizes: tuple[int, int]) -> list[int]:
    """Pages hit on device and on host by an exclusive cache, whose invariants are checked."""
    cache = make_cache(
        device=(sizes[0], 0, 0),
        host=(sizes[1], 0, 0),
        write_policy="write_back",
        device_host="exclusive",
        trims_leaves=True,
        load_back_threshold=0,
    )
    hits = [0, 0]
    for number, prompt in enumerate(prompts):
        sequence = Sequence(np.repeat(np.array(prompt, "<i4"), PAGE).tobytes())
        found = cache.acquire(sequence, cache.match(sequence, len(prompt) * PAGE + 1))
        assert found is not None
        hits[0] += found.device_len // PAGE
        hits[1] += found.host_len // PAGE
        cache.complete_all()
        assert cache.extend(sequence, len(prompt) * PAGE)
        cache.complete_all()
        cache.finish(sequence, len(prompt))
        cache.complete_all()
        if number % 50 == 0:
            invariants.check(cache, None, [])
    return hits


def conversations(seed: int) -> list[Prompt]:
    """400 prompts, as page numbers, of conversations that grow, branch and begin anew."""
    rng = Random(seed)
    prompts: list[Prompt] = []
    for number in range(400):
        old = rng.choice(prompts[-40:]) if prompts and rng.random() < 0.7 else ()
        kept = old[: rng.randint(len(old) // 2, len(old))]
        new = range(1000 * number, 1000 * number + rng.randint(1, 6))
        prompts.append((*kept, *new)[:20])
    return prompts


@pytest.mark.parametrize(("seed", "sizes"), [(0, (40, 80)), (1, (60, 25))])
def test_exclusive_tiers_have_the_hits_of_a_brute_force_lru_model(seed, sizes):
    brute = BruteForce(*sizes)
    for number, prompt in enumerate(conversations(seed)):
        brute.serve(number, prompt)
    assert min(brute.hits) > 0
    assert hits_of(conversations(seed), sizes) == brute.hits
