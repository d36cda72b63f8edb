"""Requests for fake sides, and how a fake side is started."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from experiments.diff.engines import Launch
from experiments.diff.protocol import Pools
from hicache.request import Request
from tests.scheduler.world import request_of

PAGE = 4
POOLS = Pools(page_size=PAGE, device_tokens=400, host_tokens=0, has_storage=False, max_len=200)
FAKE = Launch(name="fake", interpreter=sys.executable, module="tests.diff.fake_side")


def fake(options: dict[str, str] | None) -> Launch:
    """How to start a fake side with these options."""
    return replace(FAKE, options=options or {})


def prompt(name: int, num_pages: int) -> list[int]:
    """The tokens of pages that only prompts of this name have, and a token to compute."""
    return [*range(name * 1000, name * 1000 + num_pages * PAGE), name]


def requests_of(*prompts: Sequence[int]) -> list[Request]:
    """Requests with these prompts, one after the other, and answers that no two share."""
    return [
        request_of(number, each, [900_000 + number, 910_000 + number], number)
        for number, each in enumerate(prompts)
    ]
