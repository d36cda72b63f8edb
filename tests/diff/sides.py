"""Requests for fake sides, and how one is started."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.diff.engines import Launch
from experiments.diff.protocol import Pools
from hicache.request import Request, TokenSpans

PAGE = 4
POOLS = Pools(page_size=PAGE, device_tokens=400, host_tokens=0, has_storage=False, max_len=200)
FAKE = Launch(name="fake", interpreter=sys.executable, module="tests.diff.fake_side")


def fake(options: dict[str, str] | None) -> Launch:
    """One with these options."""
    return replace(FAKE, options=options or {})


def prompt(name: int, num_pages: int) -> list[int]:
    """Pages that only prompts of this name have, and a token to compute."""
    return [*range(name * 1000, name * 1000 + num_pages * PAGE), name]


def requests_of(*prompts: Sequence[int]) -> list[Request]:
    """One after the other, with answers that nobody else has."""
    return [
        Request(
            id=number,
            session_id=number,
            arrival_ns=number,
            prompt=spans(each),
            output=spans([900_000 + number, 910_000 + number]),
        )
        for number, each in enumerate(prompts)
    ]


def spans(tokens: Sequence[int]) -> TokenSpans:
    """Each token a run of its own."""
    return TokenSpans(np.array(tokens, np.int32), np.ones(len(tokens), np.int32))
