"""Divides a trace among replicas line by line, so that no process holds all of it.

The trace must be JSON lines in order of time that name their sessions. All requests of a session
stay on one replica, and new sessions go to the replicas in turn, as with the router `sticky`.
"""

import gzip
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import Struct

from hicache.config import TraceConfig
from hicache.request import Request
from hicache.workload.trace import Name, Trace, TraceError
from hicache.workload.workload import form_of, parsed

GZIP = b"\x1f\x8b"
LEAST_BYTES = 8 << 20  # a smaller file fits in memory, and then its distinct tokens are counted


class _Line(Struct):
    timestamp: float
    hash_ids: msgspec.Raw  # not decoded
    session_id: Name
    # other links between requests, which may join sessions
    chat_id: Name | None = None
    parent: Name | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The lines of one replica in a file of their own, after the first line of the trace.

    The first line gives all parts the same start. `numbers` holds the places of the lines in the
    trace, from 0. Only the first part owns the first line.
    """

    path: Path
    numbers: "array[int]"
    owns_first: bool

    def __len__(self) -> int:
        return len(self.numbers) - (not self.owns_first)

    def requests(self, config: TraceConfig, seed: int) -> list[Request]:
        """Return the requests of this replica, with their ids in the whole trace.

        Raises:
            TraceError: a line cannot be used.
        """
        trace = Trace(self.path, odd_rows=config.odd_rows)
        found = parsed(trace, form_of(trace), config, seed).requests
        if len(found) != len(self.numbers) or trace.counts:
            raise TraceError(f"{trace.path.name}: {'; '.join(trace.notes)}: parallel.workers=null")
        numbers = self.numbers
        return [
            replace(
                each,
                id=numbers[each.id],
                parent_id=None if each.parent_id is None else numbers[each.parent_id],
            )
            for each in found[not self.owns_first :]
        ]


def divide(config: TraceConfig, folder: Path, num_parts: int) -> list[Part] | None:
    """Write the lines of each replica to a file in `folder`; return None if that is impossible.

    It is possible if each line has a time and a session, and no setting changes which requests
    there are, or when they arrive. Small files are not divided.
    """
    changes = (config.limit, config.load, config.slice, config.max_context, config.start_jitter_s)
    path = Path(config.path or "")
    is_large = path.is_file() and path.stat().st_size >= LEAST_BYTES
    if any(changes) or config.time_scale != 1 or config.token_stride != 1 or not is_large:
        return None
    decode = msgspec.json.Decoder(_Line).decode
    homes: dict[Name, int] = {}  # by session
    numbers = [array("q", [0]) for _ in range(num_parts)]
    paths = [folder / f"{number}.jsonl" for number in range(num_parts)]
    with ExitStack() as stack:
        with path.open("rb") as start:
            unpack = gzip.open if start.read(2) == GZIP else open
        lines = stack.enter_context(unpack(path, "rb"))
        files = [stack.enter_context(each.open("wb")) for each in paths]
        now, number = 0.0, 0
        for line in lines:
            if not line.strip():
                continue
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
            if row.timestamp < now or row.chat_id is not None or row.parent is not None:
                return None
            home = homes.setdefault(row.session_id, len(homes) % num_parts)
            for each in files if number == 0 else (files[home],):
                each.write(line.rstrip() + b"\n")
            if number:
                numbers[home].append(number)
            now, number = row.timestamp, number + 1
    return [Part(*each, place == 0) for place, each in enumerate(zip(paths, numbers, strict=True))]
