from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace
from typing import IO

import pytest

from experiments.diff import process, simulator  # noqa: F401 - sides import it
from experiments.diff.compare import Comparison, compare
from experiments.diff.serve import main
from hicache.request import Request
from tests.diff.sides import POOLS, fake
from tests.forked import Forked, print_to


def _serve(output: int, module: str, wire: str) -> None:
    print_to(output)
    main(module, wire)


class ForkedSide(Forked):
    """The program of a side in a copy of this process, which has imported most of what it needs.

    Stands in for `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], *, stdout: IO[str], **_: object) -> None:
        if not Path(command[0]).exists():
            raise FileNotFoundError(command[0])
        super().__init__(_serve, stdout.fileno(), *command[4:6])

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)


@pytest.fixture(autouse=True)
def sides_start_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(Popen=ForkedSide, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(process, "subprocess", stand_in)


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
