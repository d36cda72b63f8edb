"""Token ids as lists of runs `(first id, count)`, used while a workload is built.

Runs stay merged: no run begins where the previous one ends, so equal sequences have equal lists.
Finished requests carry `TokenSpans` instead.
"""

from collections.abc import Iterable

import numpy as np

from hicache.request import EMPTY_SPANS, TokenSpans

Runs = list[tuple[int, int]]


def append_run(runs: Runs, first: int, count: int) -> None:
    if count <= 0:
        return
    if runs:
        last_first, last_count = runs[-1]
        if last_first + last_count == first:
            runs[-1] = (last_first, last_count + count)
            return
    runs.append((first, count))


def extend_runs(runs: Runs, more: Iterable[tuple[int, int]]) -> None:
    for first, count in more:
        append_run(runs, first, count)


def cut_runs(runs: Runs, begin: int, end: int) -> Runs:
    """Return the part of the token sequence `runs` from position `begin` to just before `end`.

    `runs` holds pairs (first id, number of consecutive ids). The result is shorter if `runs` ends
    before `end`.
    """
    piece: Runs = []
    if begin >= end:
        return piece
    position = 0
    for first, count in runs:
        # the run covers [position, stop)
        stop = position + count
        if stop > begin:
            if position >= end:
                break
            skipped = begin - position if begin > position else 0
            piece.append((first + skipped, (stop if stop < end else end) - position - skipped))
        position = stop
    return piece


def runs_len(runs: Runs) -> int:
    return sum(count for _, count in runs)


def is_prefix(head: Runs, whole: Runs) -> bool:
    return cut_runs(whole, 0, runs_len(head)) == head


def to_spans(runs: Runs) -> TokenSpans:
    if not runs:
        return EMPTY_SPANS
    pairs = np.array(runs, np.int32)
    return TokenSpans(pairs[:, 0].copy(), pairs[:, 1].copy())
