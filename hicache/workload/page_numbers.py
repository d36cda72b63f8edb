"""Numbers the whole pages of a workload: equal numbers mean equal tokens up to the page's end.

With an `overlap`, they mean that so many tokens of the next page are equal, too.

The pages that a request does not share with earlier requests get consecutive numbers. So its pages
are a few runs of numbers, like its tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hicache.request import Request, TokenSpans
from hicache.workload.kept import kept


def page_numbers(
    requests: Sequence[Request], page_size: int, overlap: int = 0
) -> dict[int, TokenSpans]:
    if not requests:
        return {}
    spans = [part for each in requests for part in (each.prompt, each.output)]
    shapes = [len(part.starts) for part in spans], [each.namespace for each in requests]
    made_of = repr((page_size, overlap, *shapes))
    arrays = kept(
        lambda: _numbered(requests, page_size, overlap),
        made_of.encode(),
        np.concatenate([part.starts for part in spans]).tobytes(),
        np.concatenate([part.counts for part in spans]).tobytes(),
    )
    starts, counts = arrays["starts"], arrays["counts"]
    bounds = pairwise(arrays["bounds"].tolist())
    return {
        request.id: TokenSpans(starts[first:end], counts[first:end])
        for request, (first, end) in zip(requests, bounds, strict=True)
    }


def _numbered(requests: Sequence[Request], page_size: int, overlap: int) -> dict[str, NDArray[Any]]:
    numbering = _Numbering(page_size, overlap)
    runs: list[tuple[int, int]] = []
    bounds = [0]
    for request in requests:
        runs += numbering.runs(request)
        bounds.append(len(runs))
    pairs = np.array(runs, np.int32).reshape(-1, 2)
    return {"starts": pairs[:, 0], "counts": pairs[:, 1], "bounds": np.array(bounds)}


class _Numbering:
    def __init__(self, page_size: int, overlap: int) -> None:
        self._page_size, self._overlap = page_size, overlap
        # Each run of new numbers is a path in the prefix tree. If a request continues a page with
        # the contents of the next page on the path, it gets that page's number. By the page before
        # a path and its first contents: the path's start.
        self._begins: dict[tuple[int, int], int] = {}
        self._ends: list[int] = []  # ends of the runs, rising
        # by page: its first id if its ids are consecutive, else a negative number
        self._contents = np.empty(1024, np.int64)
        self._namespaces: dict[str, int] = {}
        # contents of pages whose ids are not consecutive
        self._broken: dict[tuple[int, bytes, bytes], int] = {}

    def runs(self, request: Request) -> list[tuple[int, int]]:
        contents = self._contents_of(request)
        before = self._namespaces.setdefault(request.namespace, -1 - len(self._namespaces))
        found: list[tuple[int, int]] = []
        place, end = 0, len(contents)
        while place < end:
            first = self._begins.get((before, int(contents[place])))
            if first is None:
                found.append((self._grow(before, contents[place:]), end - place))
                break
            most = min(self._ends[bisect_right(self._ends, first)] - first, end - place)
            differs = self._contents[first : first + most] != contents[place : place + most]
            count = int(differs.argmax()) if differs.any() else most
            found.append((first, count))
            place += count
            before = first + count - 1
        return found

    def _grow(self, before: int, contents: NDArray[np.int64]) -> int:
        first = self._ends[-1] if self._ends else 0
        end = first + len(contents)
        if end > len(self._contents):
            self._contents = np.resize(self._contents, max(end, 2 * len(self._contents)))
        self._contents[first:end] = contents
        self._begins[before, int(contents[0])] = first
        self._ends.append(end)
        return first

    def _contents_of(self, request: Request) -> NDArray[np.int64]:
        size, overlap = self._page_size, self._overlap
        parts = (request.prompt, request.output)
        starts = np.concatenate([part.starts for part in parts]).astype(np.int64)
        counts = np.concatenate([part.counts for part in parts]).astype(np.int64)
        # true if a run does not continue the previous one
        is_new = np.append(True, starts[1:] != (starts + counts)[:-1])
        starts, ends = starts[is_new], counts.cumsum()[np.append(is_new[1:], True)]
        begins = np.append(0, ends[:-1])
        places = np.arange((ends[-1] - overlap) // size) * size
        run = ends.searchsorted(places, side="right")
        contents: NDArray[np.int64] = starts[run] + places - begins[run]
        for page in np.flatnonzero(places + size + overlap > ends[run]).tolist():
            place, first = places[page], run[page]
            last = ends.searchsorted(place + size + overlap)
            tokens = (
                int(contents[page]),
                starts[first + 1 : last + 1].tobytes(),
                (ends[first:last] - place).tobytes(),
            )
            contents[page] = self._broken.setdefault(tokens, -1 - len(self._broken))
        return contents
