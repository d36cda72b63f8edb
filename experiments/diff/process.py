"""One side of a comparison, as the program that compares sees it: a process behind two pipes."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from experiments.diff.engines import ROOT, Launch, environment_of
from experiments.diff.protocol import (
    Outcome,
    Pools,
    SideError,
    Span,
    Tokens,
    outcome_from_json,
    tokens_to_json,
)

# what the process may import besides its own: ours, and the modules of whoever started it
PROGRAM = (
    "import sys; module, *more = sys.argv[1:]; sys.path += more;"
    " from experiments.diff.serve import main; main(module)"
)
PATIENCE_S = 10.0  # for a process that was told to close


class SideProcess:
    """Asks one process; used with `with`, which ends it.

    `ask_admit` and `take_outcome` are apart so that two sides can work at the same time.
    """

    def __init__(self, launch: Launch, pools: Pools, log: Path) -> None:
        """`log`: what the process writes besides its answers."""
        self.name = launch.name
        self._log_path = log
        self._log: IO[str] = log.open("w")
        self._process = subprocess.Popen(
            [
                *(launch.interpreter, "-P", "-c", PROGRAM, launch.module),
                *dict.fromkeys([str(ROOT), str(Path.cwd()), *(sys.path[:1] or [])]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment_of(launch),
        )
        self._say({"open": {"pools": asdict(pools), "options": launch.options}})

    def about(self) -> dict[str, str]:
        """Version and the like; waits until the side has been opened. Once, before the rest."""
        about: dict[str, str] = self._hear()["about"]
        return about

    def ask_admit(
        self, number: int, tokens: Tokens, prompt_len: int, *, finished: list[int]
    ) -> None:
        """A request comes, after the answers of `finished` were complete."""
        self._say(
            {
                "admit": number,
                "prompt_len": prompt_len,
                "tokens": tokens_to_json(tokens),
                "finish": finished,
            }
        )

    def take_outcome(self) -> Outcome:
        """The answer to the oldest question."""
        return outcome_from_json(self._hear())

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        """Which of these tokens are held, by component and tier."""
        self._say({"probe": tokens_to_json(tokens)})
        spans: dict[str, list[list[int]]] = self._hear()["spans"]
        return {name: [(start, end) for start, end in each] for name, each in spans.items()}

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._say({"close": True})
                self._process.wait(PATIENCE_S)
        except (SideError, subprocess.TimeoutExpired):
            pass  # it has answered all that was asked
        finally:
            self._process.kill()
            self._process.communicate()
            self._log.close()

    def _say(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._hear()  # an error that it gave before it ended says more
            raise

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.name}: its process ended; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return f"the last line of {self._log_path} is: {lines[-1]}" if lines else "it said nothing"
