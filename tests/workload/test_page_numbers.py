"""Numbers of pages: equal exactly where all tokens up to the end of the page are equal."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from hicache.request import Request, TokenSpans
from hicache.workload.page_numbers import page_numbers


def spans_of(*runs: tuple[int, int]) -> TokenSpans:
    starts, counts = zip(*runs, strict=True)
    return TokenSpans(np.array(starts, np.int32), np.array(counts, np.int32))


def request_of(number: int, prompt: TokenSpans, output: TokenSpans, namespace: str = "") -> Request:
    tokens = {"prompt": prompt, "output": output, "namespace": namespace}
    return Request(id=number, session_id=number, arrival_ns=0, **tokens)


def check(requests: Sequence[Request], page_size: int) -> int:
    """Compare the numbers with the tokens; return how many different pages there are."""
    numbers = page_numbers(requests, page_size)
    tokens_of: dict[int, tuple[str, bytes]] = {}
    number_of: dict[tuple[str, bytes], int] = {}
    for request in requests:
        tokens = request.prompt.to_bytes() + request.output.to_bytes()
        own = np.frombuffer(numbers[request.id].to_bytes(), "<i4").tolist()
        assert len(own) == len(tokens) // (4 * page_size)
        for page, number in enumerate(own):
            prefix = (request.namespace, tokens[: 4 * page_size * (page + 1)])
            assert tokens_of.setdefault(number, prefix) == prefix
            assert number_of.setdefault(prefix, number) == number
    return len(number_of)


def drawn(rng: Random, number: int, known: list[list[int]]) -> Request:
    """Draw a request that begins with part of one in `known` (token ids), and add its ids to it."""
    ids = list(rng.choice(known)) if known and rng.random() < 0.8 else []
    ids = ids[: rng.randint(0, len(ids))]
    while len(ids) < 4 or rng.random() < 0.7:
        first = rng.randint(0, 8)
        ids += range(first, first + rng.randint(1, 9))
    known.append(ids)
    cut = rng.randint(1, len(ids) - 1)
    parts = []
    for part in (ids[:cut], ids[cut:]):
        runs = [(part[0], 1)]
        for each in part[1:]:
            first, count = runs[-1]
            if each == first + count and rng.random() < 0.9:  # now and then a run is split
                runs[-1] = (first, count + 1)
            else:
                runs.append((each, 1))
        parts.append(spans_of(*runs))
    return request_of(number, parts[0], parts[1], rng.choice(["", "", "other"]))


@pytest.mark.parametrize("page_size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_pages_have_equal_numbers_where_prefixes_are_equal(seed, page_size):
    rng, known = Random(seed), []
    check([drawn(rng, number, known) for number in range(60)], page_size)


def test_only_whole_pages_are_numbered_wherever_the_answer_begins():
    early = request_of(0, spans_of((0, 5)), spans_of((5, 11)))
    late = request_of(1, spans_of((0, 13)), spans_of((13, 3)))
    assert check([early, late], 4) == 4
    assert check([request_of(0, spans_of((0, 2)), spans_of((9, 1)))], 4) == 0


def test_kept_page_numbers_are_used_for_equal_requests_only():
    first = [request_of(7, spans_of((0, 8)), spans_of((50, 8)))]
    other = [request_of(7, spans_of((0, 8)), spans_of((51, 8)))]
    for requests in (first, other, [*first, *other], first):
        requests = [request_of(n, r.prompt, r.output) for n, r in enumerate(requests)]
        check(requests, 4)
