"""Tables of lengths and times: a CSV file with a header, one request per row.

The loader knows the column names of public tables (Azure's, BurstGPT's, Vidur's, ours) and ignores
other columns. Times are seconds, milliseconds if the column's name ends in `_ms`, or dates. Prompts
share no tokens, unless a column names the session: then each turn repeats the previous prompt and
answer, and appends to them.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.rows import Row, from_first, rows_to_requests
from hicache.workload.trace import TraceError, date_ns

COLUMNS = {
    "time": ("timestamp", "timestamp_ms", "time", "time_ms", "arrived_at", "arrival_s"),
    "prompt": ("input_length", "contexttokens", "request tokens", "num_prefill_tokens", "in"),
    "answer": ("output_length", "generatedtokens", "response tokens", "num_decode_tokens", "out"),
    "session": ("session_id", "session id", "session", "conversation_id", "chat_id"),
}


def load_lengths(path: Path, config: WorkloadConfig) -> list[Request]:
    """Load a CSV table of prompt and answer lengths as requests in order of arrival.

    The table also has a column of times. The first request arrives at time 0.

    Raises:
        TraceError: a row is malformed; the message names the file and the line.
    """
    rows = from_first(path, _rows(path))
    return rows_to_requests(rows, config, block_tokens=1)


def _rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.reader(lines, strict=True)
        try:
            header = next(table, [])
            place = _places(path, header)
            line = table.line_num + 1  # first line of the next row: a field may span lines
            for fields in table:
                where, line = f"{path}, line {line}", table.line_num + 1
                if not fields:
                    continue
                if len(fields) > len(header):
                    raise TraceError(f"{where}: the row has more fields than the table has columns")
                record = dict(zip(header, fields, strict=False))
                yield Row(
                    where=where,
                    arrival_ns=_time_ns(record, place["time"], where),
                    prompt_len=_tokens(record, place["prompt"], where),
                    output_len=_tokens(record, place["answer"], where),
                    session=record.get(place["session"]) or None if "session" in place else None,
                )
        except (UnicodeDecodeError, csv.Error) as error:
            told = f"{path}, after line {table.line_num}: not a CSV table in UTF-8 ({error})"
            raise TraceError(told) from error


def _places(path: Path, header: Sequence[str]) -> dict[str, str]:
    named = {name.strip().lower(): name for name in header}
    found = {
        thing: next(named[name] for name in names if name in named)
        for thing, names in COLUMNS.items()
        if named.keys() & set(names)
    }
    for thing in ("time", "prompt", "answer"):
        if thing not in found:
            raise TraceError(
                f"{path}, line 1: expected a column {' or '.join(COLUMNS[thing])}, got "
                f"{column_names(header)}"
            )
    return found


def column_names(header: Sequence[str]) -> str:
    # the header may be private text instead of names, and must then not be in an error message
    names = [name for name in header if re.fullmatch(r"[\w .-]{1,40}", name)]
    return ", ".join(names) if len(names) == len(header) > 0 else "no comma-separated names"


def _tokens(record: Mapping[str, str], column: str, where: str) -> int:
    value = record.get(column, "")
    count = int(value) if value.strip().isdecimal() else 0
    if count < 1:
        raise TraceError(f"{where}: {column} must be an integer of at least 1, got {value!r}")
    return count


def _time_ns(record: Mapping[str, str], column: str, where: str) -> int:
    value = record.get(column, "")
    unit_ns = 10**6 if column.strip().lower().endswith("_ms") else 10**9
    try:
        return round(float(value) * unit_ns)
    except (ValueError, OverflowError):
        pass
    try:
        return date_ns(value[:26])  # Azure writes a seventh digit
    except ValueError as error:
        raise TraceError(f"{where}: {column} must be a number or a date, got {value!r}") from error
