"""Token ids as lists of runs `(first id, count)`, while a workload is being put together.

Runs are kept merged: no run begins where the one before it ends, so that equal sequences have
equal lists. `TokenSpans` is the form a finished request carries.
"""

from collections.abc import Iterable

import numpy as np

from hicache.request import EMPTY_SPANS, TokenSpans

Runs = list[tuple[int, int]]


def append_run(runs: Runs, first: int, count: int) -> None:
    """Add `count` ids from `first` at the end; none if `count` is 0."""
    if count <= 0:
        return
    if runs:
        last_first, last_count = runs[-1]
        if last_first + last_count == first:
            runs[-1] = (last_first, last_count + count)
            return
    runs.append((first, count))


def extend_runs(runs: Runs, more: Iterable[tuple[int, int]]) -> None:
    """Add all of `more` at the end."""
    for first, count in more:
        append_run(runs, first, count)


def cut_runs(runs: Runs, begin: int, end: int) -> Runs:
    """The ids at positions [begin, end), fewer where `runs` ends earlier."""
    piece: Runs = []
    if begin >= end:
        return piece
    position = 0
    for first, count in runs:
        # the run holds [position, stop)
        stop = position + count
        if stop > begin:
            if position >= end:
                break
            skipped = begin - position if begin > position else 0
            piece.append((first + skipped, (stop if stop < end else end) - position - skipped))
        position = stop
    return piece


def runs_len(runs: Runs) -> int:
    """Tokens in all runs."""
    return sum(count for _, count in runs)


def is_prefix(head: Runs, whole: Runs) -> bool:
    """Whether `whole` begins with `head`; both must be merged."""
    if not head:
        return True
    if len(head) > len(whole):
        return False
    last = len(head) - 1
    first, count = head[last]
    whole_first, whole_count = whole[last]
    return first == whole_first and count <= whole_count and head[:last] == whole[:last]


def to_spans(runs: Runs) -> TokenSpans:
    """The same ids as a request carries them."""
    if not runs:
        return EMPTY_SPANS
    pairs = np.array(runs, np.int32)
    return TokenSpans(pairs[:, 0].copy(), pairs[:, 1].copy())
