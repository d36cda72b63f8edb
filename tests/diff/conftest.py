from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.diff.compare import Comparison, compare
from hicache.request import Request
from tests.diff.sides import POOLS, fake


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Comparison]:
    def run(
        requests: list[Request],
        base: dict[str, str] | None = None,
        head: dict[str, str] | None = None,
        **more: bool,
    ) -> Comparison:
        return compare(requests, POOLS, (fake(base), fake(head)), tmp_path, **more)

    return run
