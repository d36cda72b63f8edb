"""Parsed traces as arrays, so that later runs need not parse the same trace again."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from hicache.request import Request, TokenSpans
from hicache.workload.kept import Arrays, kept


def load_parsed(
    path: Path, parse: Callable[[], list[Request]], limit: int | None, *settings: object
) -> list[Request]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    contents = [file.read_bytes() for file in files if file.is_file()]
    arrays = kept(lambda: _packed(parse()), repr(settings).encode(), *contents)
    return _unpacked(arrays, limit)


def _packed(requests: list[Request]) -> Arrays:
    spans = [part for each in requests for part in (each.prompt, each.output)]
    numbers = [
        (r.id, r.session_id, r.arrival_ns, -1 if r.parent_id is None else r.parent_id, r.think_ns)
        for r in requests
    ]
    texts = [(r.stop_reason, r.namespace) for r in requests]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    return {
        "starts": np.concatenate([part.starts for part in spans]),
        "counts": np.concatenate([part.counts for part in spans]),
        "bounds": np.cumsum([0, *(len(part.starts) for part in spans)]),
        "numbers": np.array(numbers, np.int64),
        "joins": np.array([join for r in requests for join in r.joins], np.int64),
        "join_bounds": np.cumsum([0, *(len(r.joins) for r in requests)]),
        "texts": np.frombuffer(json.dumps([*places]).encode(), np.uint8),
        "text_of": np.array([places[text] for text in texts], np.int64),
    }


def _unpacked(arrays: Arrays, limit: int | None) -> list[Request]:
    numbers = arrays["numbers"][:limit].tolist()
    joins = arrays["joins"].tolist()
    join_bounds = pairwise(arrays["join_bounds"][: len(numbers) + 1].tolist())
    bounds = arrays["bounds"][: 2 * len(numbers) + 1].tolist()
    starts, counts = (arrays[name].astype(np.int32, copy=False) for name in ("starts", "counts"))
    spans = [TokenSpans(starts[first:end], counts[first:end]) for first, end in pairwise(bounds)]
    texts = json.loads(arrays["texts"].tobytes())
    text_of = [texts[place] for place in arrays["text_of"][:limit].tolist()]
    return [
        Request(
            id=number,
            session_id=session,
            arrival_ns=arrival_ns,
            prompt=prompt,
            output=output,
            parent_id=None if parent < 0 else parent,
            joins=tuple(joins[first:end]),
            think_ns=think_ns,
            stop_reason=stop_reason,
            namespace=namespace,
        )
        for (number, session, arrival_ns, parent, think_ns), (first, end), prompt, output, (
            stop_reason,
            namespace,
        ) in zip(numbers, join_bounds, spans[::2], spans[1::2], text_of, strict=True)
    ]
