"""Compares memory after a launch under `check` with a right copy, and names the differences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hicache.workbench.check_cases import GUARD_BYTES, Case, Pool, Round

WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    kind: str
    sentence: str


@dataclass
class Seen:
    """The memory of two pools before and after a launch of a copy kernel.

    All tensors are in host memory. The class compares the result with a right copy.
    """

    case: Case
    each: Round
    src_before: Tensor
    before: Tensor
    got: Tensor
    earlier: Sequence[tuple[Round, Tensor]]

    def __post_init__(self) -> None:
        self.want = self._copied(self.each, self.src_before)
        self.named = torch.zeros_like(self.got)  # 1 for bytes of targets
        for buffer in self.case.dst.twin(self.named).buffers:
            buffer.view(torch.uint8)[_moved(self.each)[1]] = 1

    def faults(self) -> list[Fault]:
        differs = self.got != self.want
        if not bool(differs.any()):
            return []
        for other, content in reversed(self.earlier):
            if other != self.each and torch.equal(self.got, self._copied(other, self.src_before)):
                return [self._says("stale", f"the ids of an earlier launch ({other.what}) moved")]
            if torch.equal(self.got, self._copied(other, content)):
                return [self._says("stale", "the bytes of an earlier launch were written again")]
        inside, outside = differs & (self.named == 1), differs & (self.named == 0)
        found = self._inside(inside)
        if bool(outside.any()):
            place = self._place_outside(int(outside.nonzero()[0]))
            found.append(self._says("stray", f"{int(outside.sum())} bytes changed {place}"))
        return found

    def _inside(self, differs: Tensor) -> list[Fault]:
        found = []
        words = differs.view(-1, WORD_BYTES).any(1)

        def sort(kind: str, is_it: Tensor, sentence: str) -> None:
            nonlocal words
            these, words = words & is_it, words & ~is_it
            if bool(these.any()):
                first = int((differs & these.repeat_interleave(WORD_BYTES)).nonzero()[0])
                num_bytes = WORD_BYTES * int(these.sum())
                found.append(
                    self._says(kind, f"{self._place(first)}: {num_bytes} bytes {sentence}")
                )

        sort("missing", self._all_bytes_of(self.before), "in all were never written")
        for _, content in self.earlier:
            past = self._copied(self.each, content)
            sort("stale", self._all_bytes_of(past), "in all are of an earlier launch")
        source_words = self.src_before.view(torch.int64)
        of_source = torch.isin(self.got.view(torch.int64), source_words)
        sort("overlap", of_source, "in all belong to another place")
        sort("wrong", torch.ones_like(words), "in all are neither old nor of the source")
        return found

    def _all_bytes_of(self, other: Tensor) -> Tensor:
        # true for a word if each of its bytes is right or equals that of `other`
        same = (self.got == other) | (self.got == self.want)
        return same.view(-1, WORD_BYTES).all(1)

    def _copied(self, each: Round, src_content: Tensor) -> Tensor:
        sources, targets = _moved(each)
        result = self.before.clone()
        from_ = self.case.src.twin(src_content).buffers
        for src, dst in zip(from_, self.case.dst.twin(result).buffers, strict=True):
            dst.view(torch.uint8)[targets] = src.view(torch.uint8)[sources]
        return result

    def _place(self, byte: int) -> str:
        found = _holder(self.case.dst, byte)
        return "a target" if found is None else f"buffer {found[0]}, item {found[1]}"

    def _place_outside(self, byte: int) -> str:
        if byte < GUARD_BYTES:
            return "in the guard before the target pool"
        found = _holder(self.case.dst, byte)
        if found is not None:
            return f"in buffer {found[0]}, item {found[1]}, which is no target"
        if byte >= len(self.got) - GUARD_BYTES:
            return "in the guard behind the target pool"
        return "between the items of the target pool"

    def _says(self, kind: str, sentence: str) -> Fault:
        return fault_of(kind, self.case, self.each, sentence)


def fault_of(kind: str, case: Case, each: Round | None, sentence: str) -> Fault:
    launch = "" if each is None else f"; {each.what}, {each.num_programs or 'its own'} programs"
    return Fault(kind=kind, sentence=f"{case.name}{launch}: {sentence}")


def _moved(each: Round) -> tuple[list[int], list[int]]:
    named = zip(each.src_ids, each.dst_ids, strict=True)
    pairs = [(src, dst) for src, dst in named if src >= 0 and dst >= 0]
    return [src for src, _ in pairs], [dst for _, dst in pairs]


def _holder(pool: Pool, byte: int) -> tuple[int, int] | None:
    mark = torch.zeros(len(pool.arena), dtype=torch.uint8)
    for number, buffer in enumerate(pool.twin(mark).buffers):
        for item in range(buffer.shape[0]):
            buffer.view(torch.uint8)[item] = 1
            if mark[byte]:
                return number, item
            buffer.view(torch.uint8)[item] = 0
    return None
