"""SGLang's caches of the stages of a pipeline: one process each, which vote along a chain.

Each stage has its own tree, pools and storage, and sees the same requests. With delayed copies,
those of stage s take s requests longer than those of stage 0. Stage 0 alone counts the copies that
have ended; the others take as many (`UnifiedRadixCache._sync_hicache_ready_counts`).
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed

from experiments.diff.protocol import (
    Arrival,
    Outcome,
    Pools,
    SideError,
    Span,
    StepRow,
    Tokens,
)

PATIENCE = timedelta(seconds=60)
Opener = Callable[[Pools, Mapping[str, str]], Any]


class Stages:
    """The sides of all stages as one side, which answers as stage 0.

    `open_stage` opens the side of one stage. `options` contains `stages`, their number, and
    `votes=no` if each stage is to count its own copies, as a planted mistake.

    Raises:
        SideError: the stages decide differently. Nothing can be compared after that.
    """

    def __init__(self, open_stage: Opener, pools: Pools, options: Mapping[str, str]) -> None:
        count = int(options["stages"])
        self._wires: list[Connection] = []
        fork = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"{folder}/ranks"
            for rank in range(1, count):
                ours, theirs = fork.Pipe()
                arguments = (open_stage, pools, options, rank, meeting, theirs)
                fork.Process(target=_serve, args=arguments, daemon=True).start()
                theirs.close()
                self._wires.append(ours)
            self._first = _open(open_stage, pools, options, 0, meeting)
            for wire in self._wires:  # all have met
                _heard(wire)

    def about(self) -> dict[str, str]:
        about: dict[str, str] = self._first.about()
        return about | {"stages": f"{len(self._wires) + 1}"}

    def admit(self, number: int, tokens: Tokens, prompt_len: int, stage: str = "") -> Outcome:
        outcome: Outcome = self._all("admit", number, tokens, prompt_len, stage)
        return outcome

    def finish(self, number: int) -> None:
        self._all("finish", number)

    def abort(self, number: int) -> None:
        self._all("abort", number)

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        found: dict[str, list[Span]] = self._all("probe", tokens)
        return found

    def step(self, arrivals: list[Arrival]) -> StepRow:
        raise SideError("--stages compares requests one at a time, not with --in-flight")

    def close(self) -> None:
        self._all("close")

    def _all(self, name: str, *arguments: Any) -> Any:
        for wire in self._wires:
            wire.send((name, *arguments))
        answer = getattr(self._first, name)(*arguments)
        for rank, wire in enumerate(self._wires, 1):
            other = _heard(wire)
            if other != answer:
                what = f"{name} {arguments[0]}" if name != "probe" else name
                raise SideError(
                    f"stage {rank} differs from stage 0 at {what}: {_differing(other, answer)}"
                )
        return answer


def _open(
    open_stage: Opener, pools: Pools, options: Mapping[str, str], rank: int, meeting: str
) -> Any:
    count = int(options["stages"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=PATIENCE
    )
    if pools.copy_delay:
        pools = replace(pools, copy_delay=pools.copy_delay + rank)
    return open_stage(pools, {**options, "rank": f"{rank}"})


def _serve(
    open_stage: Opener,
    pools: Pools,
    options: Mapping[str, str],
    rank: int,
    meeting: str,
    wire: Connection,
) -> None:
    try:
        side = _open(open_stage, pools, options, rank, meeting)
        wire.send(None)
        while True:
            name, *arguments = wire.recv()
            wire.send(getattr(side, name)(*arguments))
            if name == "close":
                break
    except Exception as error:
        wire.send(error if isinstance(error, SideError) else SideError(f"stage {rank}: {error!r}"))
    os._exit(0)  # the package leaves threads behind


def _heard(wire: Connection) -> Any:
    try:
        answer = wire.recv()
    except EOFError as error:
        raise SideError("the process of a stage ended") from error
    if isinstance(answer, SideError):
        raise answer
    return answer


def _differing(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, Outcome):
        return f"{ours} against {theirs}"
    pairs = zip(asdict(ours).items(), asdict(theirs).values(), strict=True)
    return ", ".join(f"{name} {a} against {b}" for (name, a), b in pairs if a != b)
