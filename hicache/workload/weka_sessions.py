"""Reads the sessions of kv-cache-tester and AgentX, raw or packed.

Raw sessions list every block id of every request (hundreds of megabytes). A packed session
replaces a request's `hash_ids` by `keep`, the number of leading ids shared with the previous
request of its stream, and `new`, the other ids as a flat list of (first, count) ranges. All other
fields stay. Sessions that begin with the same three requests are recordings of one session; the
longest is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np

from hicache.workload.trace import Record, TraceError, json_object, read_records

BLOCK_TOKENS = 64
SIGNATURE_REQUESTS = 3


def nested(stream: Record, where: str) -> list[Record]:
    requests = stream.get("requests")
    if not isinstance(requests, list) or not all(isinstance(entry, dict) for entry in requests):
        raise TraceError(f"{where}: requests must be a list of objects, got {requests!r:.60}")
    return cast(list[Record], requests)


def read_sessions(source: Path) -> Iterator[tuple[str, Record]]:
    """Yield the packed sessions of a file or folder, each with its path and line number.

    In a packed session, a request lists only the block ids that the previous request does not have.
    A session that is packed already stays unchanged. If several raw sessions record the same
    session, only the longest one is yielded.

    Raises:
        TraceError: a file holds no session.
    """
    kept: dict[tuple[tuple[object, object], ...], tuple[str, Record]] = {}
    for where, session in _records(source):
        if any("keep" in entry for entry in nested(session, where)):
            yield where, session
            continue
        packed = pack_session(session, where)
        signature = _signature(packed, where)
        known = kept.get(signature)
        if known is None or len(nested(known[1], known[0])) < len(nested(packed, where)):
            kept[signature] = (where, packed)
    yield from kept.values()


def _records(source: Path) -> Iterator[tuple[str, Record]]:
    if source.is_file() and source.suffix != ".json":
        for line, record in read_records(source):
            yield f"{source}, line {line}", record
        return
    for path in sorted(source.glob("*.json")) if source.is_dir() else [source]:
        yield str(path), json_object(path.read_bytes(), str(path))


def pack_session(session: Record, where: str) -> Record:
    packed: list[Record] = []
    previous = np.empty(0, np.int64)
    for place, request in enumerate(nested(session, where)):
        here = f"{where}, request {place}"
        if request.get("type") == "subagent":
            packed.append(pack_session(request, here))
            continue
        ids = _block_ids(request, here)
        shared = min(len(previous), len(ids))
        differing = np.flatnonzero(previous[:shared] != ids[:shared])
        keep = int(differing[0]) if len(differing) else shared
        kept_fields = {key: value for key, value in request.items() if key != "hash_ids"}
        packed.append({**kept_fields, "keep": keep, "new": _ranges(ids[keep:])})
        previous = ids
    return {**session, "requests": packed}


def _block_ids(request: Record, where: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers, got {ids!r:.60}")
    return np.array(ids, np.int64)


def _ranges(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    begins = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 2) != 1)
    counts = np.diff(begins, append=len(ids))
    flat: list[int] = np.stack((ids[begins], counts), axis=1).ravel().tolist()
    return flat


def _signature(session: Record, where: str) -> tuple[tuple[object, object], ...]:
    own = (entry for entry in nested(session, where) if entry.get("type") != "subagent")
    lengths = [(entry.get("in"), entry.get("out")) for entry in own]
    return tuple(lengths[:SIGNATURE_REQUESTS])
