"""Reads trace files: the container, the rows by a declared schema, and the count of odd rows.

The container follows from the content, never from the name: JSON lines, one JSON array or object, a
CSV table, or Parquet; plain, gzip or zstd. A folder is read as one trace, file after file. A reader
declares its row as a msgspec `Struct` with types, bounds and units. A row that does not fit the
schema is odd: it is left out, and counted. More odd rows than `workload.odd_rows` are an error.
Messages name the file, the line and the field, and never quote a value, which may be private.
"""

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

Record = dict[str, object]
Name = int | str
MOST_TOKENS = 10**8  # of one prompt or answer
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
BlockTokens = Annotated[int, Meta(ge=1, le=1 << 20)]
Number = Annotated[float, Meta(ge=0, le=2.0**63)]
Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 24 * 3600)]  # from a session's start
Time = float | str  # a number in the unit that the reader states, or a date

# limits on what a compressed file may unpack to, in bytes and in bytes per compressed byte
MOST_UNPACKED = 1 << 30
MOST_RATIO = 100
RATIO_FROM = 64 << 20  # smaller files may have any ratio
MOST_REPEATED = 1 << 26  # runs, blocks or messages that turns repeat, in all
ROWS_IN = re.compile(r"\.(jsonl?|[ct]sv|parquet)\b", re.IGNORECASE)  # in the names of a folder
LEAST_ALLOWED = 3  # odd rows that a small file may have, but always less than half of its rows
DELIMITERS = (",", "\t", ";")  # of the columns of a table
MOST_REASONS = 8  # that notes name
NUM_TRIED = 10  # lines in which a file's form is looked for
CHUNK = 1 << 20
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MISSING = "Object missing required field "
# msgspec's words for types, in plain words
PLAIN = {
    "`array` of length >= 1": "a list that is not empty",
    "`": "",
    " | ": " or ",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "array": "a list",
    "object": "an object",
    " >= ": " of at least ",
    " <= ": " of at most ",
    "an integer or text or null": "an integer or text",
}
Kind = TypeVar("Kind")
Made = TypeVar("Made")


class TraceError(ValueError):
    """Raised when a trace cannot be read; the message names the file and, if known, the line."""


class OddRow(ValueError):
    """Raised by a reader for a row that it cannot use; the trace leaves the row out."""


class _Odd(NamedTuple):
    where: str
    why: str


class Trace:
    """A trace file or folder, and what is counted while its rows are read.

    `odd_rows` is the largest share of rows that may be left out or completed. `notes` are sentences
    for the user about how the rows were read, and `counts` are numbers for the summary.
    """

    def __init__(self, path: Path, *, odd_rows: float = 0.1) -> None:
        self.path = path
        self.odd_rows = odd_rows
        self.num_rows = 0
        self.left_out: list[_Odd] = []
        self.completed: list[_Odd] = []
        self.outside = 0  # requests whose parent is not in the trace
        self.differing = 0  # prompts and answers whose length `usage` contradicts
        self._remarks: list[str] = []
        self._spent = 0

    @cached_property
    def files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        files = [each for each in self.path.rglob("*") if each.is_file() and each.name[0] != "."]
        # a folder may also hold a license and notes
        found = [each for each in files if ROWS_IN.search(each.name)] or files
        if not found:
            raise TraceError(f"{self.path}: the folder holds no files")
        return sorted(found, key=_natural)

    @cached_property
    def contents(self) -> list[bytes]:
        """The bytes of each file as they are stored."""
        return [each.read_bytes() for each in self.files]

    def _items(self) -> Iterator[tuple[str, Iterator[tuple[str, object]]]]:
        # for each file its container, and its records with their places
        limit = _Limit(sum(map(len, self.contents)))
        for path, data in zip(self.files, self.contents, strict=True):
            data = _unpacked(path, data, limit)
            if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # as tables of spreadsheets may be
                data = data.decode("utf-16", errors="replace").encode()
            container = _container(data)
            yield container, _records(path, data, container, limit)

    def first(self) -> tuple[str, object]:
        """Return the container and the first readable record of the trace.

        Raises:
            TraceError: no record can be read.
        """
        why = "no requests"
        for container, records in self._items():
            for _, (where, item) in zip(range(NUM_TRIED), records, strict=False):
                if not isinstance(item, bytes):
                    return container, item
                try:
                    return container, msgspec.json.decode(item)
                except UNREADABLE as error:
                    why = f"{told(error)} in {where}"
        raise TraceError(f"{self.path}: {why}")

    def read(
        self,
        kind: type[Kind],
        make: Callable[[str, Kind], Made | None],
        names: Mapping[str, tuple[str, ...]] | None = None,
        mend: Callable[[str, object], object] | None = None,
    ) -> Iterator[Made]:
        """Yield what `make` returns for each row; a row that it returns None for is no request.

        `make` gets the place of a row and the row as a `kind`. `names` lists, for a field of
        `kind`, other names that files have for it. `mend` gets the place and the JSON value of a
        row that does not fit, and returns a value that may fit.

        Raises:
            TraceError: a file is damaged, or unpacks to too many bytes.
        """
        decode = msgspec.json.Decoder(kind).decode

        def converted(where: str, item: object, container: str) -> Kind:
            value = msgspec.json.decode(item) if isinstance(item, bytes) else item
            value = _renamed(value if mend is None else mend(where, value), names or {})
            return msgspec.convert(value, kind, strict=container != "table")

        for container, records in self._items():
            for where, item in records:
                try:
                    try:
                        if isinstance(item, bytes) and names is None:
                            row = decode(item)  # this takes a fifth of the time
                        else:
                            row = converted(where, item, container)
                        made = make(where, row)
                    except (msgspec.ValidationError, OddRow) as error:
                        if mend is None and isinstance(error, OddRow):
                            raise
                        made = make(where, converted(where, item, container))
                except (*UNREADABLE, OddRow) as error:
                    self.num_rows += 1
                    self.leave_out(where, told(error))
                    continue
                if made is not None:
                    self.num_rows += 1
                    yield made

    def leave_out(self, where: str, why: str) -> None:
        self.left_out.append(_Odd(where, why))

    def complete(self, where: str, why: str) -> None:
        self.completed.append(_Odd(where, why))

    def spend(self, num_pieces: int) -> None:
        """Count pieces of a prompt that its row does not list, as it repeats earlier rows.

        Raises:
            TraceError: all prompts together have too many pieces for the memory.
        """
        self._spent += num_pieces
        if self._spent > MOST_REPEATED:
            raise TraceError(
                f"{self.path}: its turns repeat more than {MOST_REPEATED:,} pieces of earlier turns"
            )

    def remark(self, note: str) -> None:
        if note not in self._remarks:
            self._remarks.append(note)

    def check(self) -> None:
        """Check that few enough rows are odd.

        Raises:
            TraceError: too many rows were left out or completed; the message names the first ones.
        """
        most = max(LEAST_ALLOWED, int(self.odd_rows * self.num_rows))
        if self.odd_rows < 1:
            most = min(most, (self.num_rows - 1) // 2)
        for odd in (self.left_out, self.completed):
            if len(odd) <= max(most, 0):
                continue
            first = "; ".join(f"{each.where}: {each.why}" for each in odd[:3])
            raise TraceError(
                f"{first}{' …' if len(odd) > 3 else ''} ({len(odd):,} of {self.num_rows:,} rows "
                f"cannot be used as they are, and at most {max(most, 0):,} may be; "
                f"workload.odd_rows sets the share)"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        left_out = _counted(self.left_out, f"of {self.num_rows:,} rows left out")
        return (*self._remarks, *left_out, *_counted(self.completed, "rows completed"))

    @property
    def counts(self) -> dict[str, int]:
        found = {
            "trace/left_out_rows": len(self.left_out),
            "trace/completed_rows": len(self.completed),
            "trace/outside_parents": self.outside,
            "trace/differing_usage": self.differing,
        }
        return {name: count for name, count in found.items() if count}


def _counted(odd: list[_Odd], done: str) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for where, why in odd:
        places.setdefault(why, []).append(where)
    for why, found in list(places.items())[:MOST_REASONS]:
        yield f"{len(found):,} {done}: {why} (first: {found[0]})"
    if len(places) > MOST_REASONS:
        yield f"{len(places) - MOST_REASONS:,} other reasons why rows are odd"


class _Limit:
    """The bytes that compressed files of `size` bytes may unpack to, all together."""

    def __init__(self, size: int) -> None:
        self._most = self.left = min(MOST_UNPACKED, max(RATIO_FROM, MOST_RATIO * size))

    def take(self, path: Path, num_bytes: int) -> None:
        """Count the unpacked bytes of a file.

        Raises:
            TraceError: the files unpack to more bytes than the limit allows.
        """
        self.left -= num_bytes
        if self.left < 0:
            raise TraceError(
                f"{path} unpacks to more than {self._most >> 20:,} MiB, the limit for the "
                f"compressed files of a trace ({MOST_RATIO} times their size, at least "
                f"{RATIO_FROM >> 20} and at most {MOST_UNPACKED >> 20:,} MiB): unpack it first"
            )


def _unpacked(path: Path, data: bytes, limit: _Limit) -> bytes:
    """Return the contents of a file, decompressed if they are gzip or zstd.

    Raises:
        TraceError: the file is damaged, or unpacks to more bytes than the limits allow.
    """
    if data[:2] == b"\x1f\x8b":
        return _gunzip(path, data, limit)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        import pyarrow as pa  # an optional package, which reads Parquet, too

        try:
            with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
                found: bytes = stream.read(limit.left + 1)
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: damaged zstd file ({error})") from error
        limit.take(path, len(found))
        return found
    return data


def _gunzip(path: Path, data: bytes, limit: _Limit) -> bytes:
    found = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while piece := file.read1(CHUNK):
                limit.take(path, len(piece))
                found += piece
    except (OSError, EOFError, zlib.error) as error:
        line = found.count(b"\n") + 1
        raise TraceError(f"{path}, after line {line}: damaged gzip file ({error})") from error
    return bytes(found)


def _natural(path: Path) -> list[tuple[int, str]]:
    # trace.2 before trace.10
    pieces = re.split(r"(\d{1,18})", str(path))
    return [(int(piece), "") if piece.isdecimal() else (0, piece) for piece in pieces]


def _container(data: bytes) -> str:
    """Return the container of unpacked contents: lines, json, table or parquet."""
    if data[:4] == b"PAR1":
        return "parquet"
    data = data.removeprefix(b"\xef\xbb\xbf")
    start = data[:CHUNK].lstrip()[:1]
    first = next((line for line in io.BytesIO(data) if line.strip()), b"")
    if start in (b"{", b"["):
        try:
            value = msgspec.json.decode(first)
        except UNREADABLE:
            return "json" if _is_json(data) else "lines"
        # an array of objects; one line of KV events is an array that begins with a time
        is_array = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        return "json" if is_array and _is_json(data) else "lines"
    lines = io.BytesIO(data)
    if any(_is_json(line) for line, _ in zip(lines, range(NUM_TRIED), strict=False)):
        return "lines"  # the first line is cut
    return "table" if any(sign.encode() in first for sign in DELIMITERS) else "lines"


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(data), list | dict)
    except UNREADABLE:
        return False


def _records(
    path: Path, data: bytes, container: str, limit: _Limit
) -> Iterator[tuple[str, object]]:
    # the lines as bytes, or the records of the other containers
    data = data.removeprefix(b"\xef\xbb\xbf")
    if container == "lines":
        for number, line in enumerate(io.BytesIO(data), start=1):
            if line.strip():
                yield f"{path}, line {number}", line
    elif container == "json":
        value = msgspec.json.decode(data)
        for number, item in enumerate(value if isinstance(value, list) else [value], start=1):
            yield f"{path}, entry {number}", item
    elif container == "table":
        yield from _table(path, data)
    else:
        yield from _parquet(path, data, limit)


def _table(path: Path, data: bytes) -> Iterator[tuple[str, object]]:
    # letters that are not UTF-8 may stand in columns that are not read
    file = io.StringIO(data.decode(errors="replace"), newline="")
    delimiter = max(DELIMITERS, key=file.readline().count)
    file.seek(0)
    table = csv.reader(file, strict=True, delimiter=delimiter)
    try:
        header = [name.strip() for name in next(table, [])]
        line = table.line_num + 1  # first line of the next row: a field may span lines
        for fields in table:
            where, line = f"{path}, line {line}", table.line_num + 1
            if len(fields) > len(header):
                yield where, fields  # an array is no row of any schema
            elif fields:
                named = zip(header, map(str.strip, fields), strict=False)
                yield where, {name: value for name, value in named if value}
    except csv.Error as error:
        told = f"{path}, after line {table.line_num}: not a CSV table ({error})"
        raise TraceError(told) from error


def _parquet(path: Path, data: bytes, limit: _Limit) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        groups = [file.metadata.row_group(each) for each in range(file.num_row_groups)]
        cells = sum(each.column(c).num_values for each in groups for c in range(each.num_columns))
        limit.take(path, max(8 * cells, sum(each.total_byte_size for each in groups)))
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}, after row {number}: damaged Parquet file ({error})") from error


def _renamed(value: object, names: Mapping[str, tuple[str, ...]]) -> object:
    if not isinstance(value, dict):
        return value
    found = {str(name).lower(): held for name, held in value.items() if held is not None}
    for name, others in names.items():
        known = next((each for each in others if each in found), None)
        if known is not None:
            found.setdefault(name, found[known])
    return {name: _plain(held) for name, held in (found if names else value).items()}


def _plain(value: object) -> object:
    # pandas writes whole numbers as floats if a value of the column is missing
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.isoformat() if isinstance(value, datetime | date) else value


def told(error: Exception) -> str:
    if isinstance(error, OddRow):
        return str(error)
    if not isinstance(error, msgspec.ValidationError):
        nested = isinstance(error, RecursionError)
        return "too deeply nested" if nested else f"not JSON ({error})"
    said, _, place = str(error).partition(" - at `$")
    if said.startswith("Expected `object`") and not place:
        return "the row must be an object with the fields of this form"
    field = place.rstrip("`").lstrip(".") or "the row"
    if said.startswith(MISSING):
        return f"{field}: {said.removeprefix(MISSING)} is missing".replace("`", "")
    if not said.startswith("Expected "):
        return f"{field}: {said[0].lower()}{said[1:]}"
    for word, plain in PLAIN.items():
        said = said.replace(word, plain)
    return f"{field} must be {said.removeprefix('Expected ')}"


def time_ns(value: object, unit_ns: int, field: str = "timestamp") -> int:
    """Return a time in ns, given as a number in units of `unit_ns`, or as a date.

    A date without a zone is in UTC.

    Raises:
        OddRow: the value is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < math.inf:
            raise OddRow(f"{field} must be a number of at least 0")
        if value * unit_ns >= 2.0**63:
            raise OddRow("its time is after the year 2106: check the unit (workload.time_unit)")
        # a whole number is exact
        return int(value) * unit_ns if value % 1 == 0 else round(value * unit_ns)
    if isinstance(value, str):
        try:
            return time_ns(float(value), unit_ns, field)
        except ValueError as error:
            if isinstance(error, OddRow):
                raise
        try:
            when = datetime.fromisoformat(value)
            passed = when.replace(tzinfo=when.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        except (ValueError, OverflowError):
            pass
        else:
            return (passed.days * 86400 + passed.seconds) * 10**9 + passed.microseconds * 1000
    raise OddRow(f"{field} must be a number or a date")
