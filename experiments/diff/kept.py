"""A side whose answers are kept in a folder, so that later comparisons need not compute them."""

import pickle
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from experiments.diff.engines import Launch
from experiments.diff.process import SideProcess
from experiments.diff.protocol import Call, Outcome, Pools, Span, StepRow, Tokens

SHARED = ("protocol", "counting", "pages")  # modules of this package that a side imports


class KeptSide:
    """Answers from a file what it has answered before, and starts its process for the rest.

    An answer depends on the release, its options, the pools and all calls so far; the digest of
    these is its name in the file. Used like `SideProcess`.
    """

    def __init__(self, launch: Launch, pools: Pools, log: Path, folder: Path) -> None:
        self.name = launch.name
        self._arguments = launch, pools, log
        told = repr((launch.name, sorted(launch.options.items()), pools)).encode()
        self._digest = _digest(_code(launch), told)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{self._digest.hex()}.pickle"
        self._answers = _read(self._file)
        self._process: SideProcess | None = None
        self._asked: list[list[Call]] = []
        # answers that are asked for and not yet taken: the name, and whether the process was asked
        self._next: list[tuple[bytes, bool]] = []

    @property
    def peak_bytes(self) -> int | None:
        return None if self._process is None else self._process.peak_bytes

    def about(self) -> dict[str, str]:
        if self._digest not in self._answers:
            self._keep(self._digest, self._start().about())
        answer = self._answers[self._digest]
        assert isinstance(answer, dict)
        return answer

    def ask(self, calls: list[Call]) -> None:
        self._digest = _digest(self._digest, _bytes_of(calls))
        if self._digest not in self._answers and self._process is None:
            process = self._start()
            process.about()
            for earlier in self._asked:
                process.ask(earlier)
                process.take_answer()
        self._asked.append(calls)
        self._next.append((self._digest, self._process is not None))
        if self._process is not None:
            self._process.ask(calls)

    def take_outcome(self) -> Outcome:
        answer = self._take()
        assert isinstance(answer, Outcome)
        return answer

    def take_row(self) -> StepRow:
        answer = self._take()
        assert isinstance(answer, dict)
        return answer

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        self.ask([("probe", tokens)])
        answer = self._take()
        assert isinstance(answer, dict)
        return answer

    def __enter__(self) -> "KeptSide":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if self._process is not None:
            self._process.__exit__(kind, *details)

    def _start(self) -> SideProcess:
        self._process = SideProcess(*self._arguments)
        return self._process

    def _take(self) -> object:
        name, is_live = self._next.pop(0)
        if is_live:
            assert self._process is not None
            self._keep(name, self._process.take_answer())
        return self._answers[name]

    def _keep(self, name: bytes, answer: object) -> None:
        if name not in self._answers:
            self._answers[name] = answer
            with self._file.open("ab") as file:
                pickle.dump((name, answer), file)


def _read(file: Path) -> dict[bytes, object]:
    answers: dict[bytes, object] = {}
    file.touch()
    with file.open("r+b") as written:
        end = 0
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                name, answer = pickle.load(written)
                answers[name], end = answer, written.tell()
        written.truncate(end)  # the last answer is incomplete if its program was killed
    return answers


def _code(launch: Launch) -> bytes:
    here = Path(__file__).parent
    driver = here / launch.module.split(".")[-2]
    files = [*sorted(driver.glob("*.py")), *(here / f"{name}.py" for name in SHARED)]
    return b"".join(file.read_bytes() for file in files)


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=16).digest()


def _bytes_of(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, list | tuple):  # calls and arrivals
        return b"".join([b"(", *map(_bytes_of, value), b")"])
    return repr(value).encode() + b","
