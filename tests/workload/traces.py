"""Small traces written for tests, and the tokens of what is loaded from them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hicache.config import TraceConfig, TraceTokens
from hicache.request import Request, TokenSpans
from hicache.workload.mooncake import load_mooncake
from hicache.workload.trace import Trace
from hicache.workload.workload import Workload, load_workload

Row = tuple[int, int, int, list[int]]  # timestamp_ms, input_length, output_length, hash_ids


def write_lines(path: Path, records: Iterable[object]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def mooncake_record(row: Row) -> dict[str, object]:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return dict(zip(names, row, strict=True))


def load_rows(
    folder: Path, rows: Iterable[Row], tokens: TraceTokens = TraceTokens.reconstructed
) -> list[Request]:
    path = write_lines(folder / "trace.jsonl", map(mooncake_record, rows))
    return load_mooncake(Trace(path), TraceConfig(tokens=tokens))


def load(path: Path, **settings: Any) -> Workload:
    """Load a trace file whose form is detected; `settings` are fields of TraceConfig."""
    config = TraceConfig(kind="trace", path=str(path), **settings)
    return load_workload(config, data_dir=None, seed=0)


def load_requests(path: Path, **settings: Any) -> list[Request]:
    return list(load(path, **settings).requests)


def ids(spans: TokenSpans) -> NDArray[np.int32]:
    return np.frombuffer(spans.to_bytes(), "<i4")


def whole(request: Request) -> NDArray[np.int32]:
    """Return the token ids of the prompt and the answer."""
    return np.concatenate((ids(request.prompt), ids(request.output)))


def shared_len(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    shortest = min(len(left), len(right))
    differing = np.flatnonzero(left[:shortest] != right[:shortest])
    return int(differing[0]) if len(differing) else shortest


def session_starts(requests: Iterable[Request]) -> list[int]:
    """For each request, the id of the first one of its session."""
    starts: dict[int, int] = {}
    return [starts.setdefault(request.session_id, request.id) for request in requests]
