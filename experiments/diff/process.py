"""One side of a comparison as a process behind a pipe, seen from the comparing program."""

import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeVar

from experiments.diff.engines import ROOT, Launch, environment_of
from experiments.diff.protocol import (
    Call,
    Outcome,
    Pools,
    SideError,
    Span,
    StepRow,
    Tokens,
)

# further entries of the module path: this repository's, and those of the starting process
PROGRAM = (
    "import sys; module, wire, *more = sys.argv[1:]; sys.path += more;"
    " from experiments.diff.serve import main; main(module, wire)"
)
PATIENCE_S = 10.0  # for a process to close
Answer = TypeVar("Answer")


class SideProcess:
    """Runs one of the compared caches in its own process; a context manager that ends the process.

    `ask` sends a question without waiting. `take_outcome` waits for the answer. So two caches can
    work at the same time. `peak_bytes` is the largest resident memory of a process that has ended
    without an error, else None.
    """

    def __init__(self, launch: Launch, pools: Pools, log: Path) -> None:
        self.name = launch.name
        self.peak_bytes: int | None = None
        self._log = log
        self._wire, theirs = Pipe()
        paths = dict.fromkeys([str(ROOT), str(Path.cwd()), *(sys.path[:1] or [])])
        with theirs, log.open("w") as written:
            self._process = subprocess.Popen(
                [
                    launch.interpreter,
                    "-P",
                    "-c",
                    PROGRAM,
                    launch.module,
                    f"{theirs.fileno()}",
                    *paths,
                ],
                stdout=written,
                stderr=written,
                pass_fds=[theirs.fileno()],
                env=environment_of(launch),
            )
        self._send((pools, launch.options))

    def about(self) -> dict[str, str]:
        return self._hear(dict)

    def ask(self, calls: list[Call]) -> None:
        self._send(calls)

    def take_outcome(self) -> Outcome:
        return self._hear(Outcome)

    def take_row(self) -> StepRow:
        return self._hear(dict)

    def take_answer(self) -> object:
        return self._hear(object)

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        self._send([("probe", tokens)])
        return self._hear(dict)

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._send([])
            with suppress(SideError, subprocess.TimeoutExpired):
                # answers that were not waited for come first, if the other side has failed
                while self.peak_bytes is None and self._wire.poll(PATIENCE_S):
                    answer = self._hear(object)
                    self.peak_bytes = answer if isinstance(answer, int) else None
                self._process.wait(PATIENCE_S)
        self._process.kill()
        self._process.wait()
        self._wire.close()

    def _send(self, told: object) -> None:
        with suppress(ConnectionError):  # messages that it sent before it ended can still be read
            self._wire.send(told)

    def _hear(self, kind: type[Answer]) -> Answer:
        try:
            answer = self._wire.recv()
        except (EOFError, ConnectionError) as error:
            raise SideError(f"{self.name}: the process ended: {self._last_words()}") from error
        if isinstance(answer, SideError):
            raise SideError(f"{self.name}: {answer}")
        assert isinstance(answer, kind)
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"the last line of {self._log} is: {lines[-1]}" if lines else "it printed nothing"
