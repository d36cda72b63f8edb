"""Reading trace files: JSON lines, plain or gzipped, with errors that name file and line."""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

Record = dict[str, object]


class TraceError(ValueError):
    """Raised when a trace cannot be read; the message names the file and, if known, the line."""


def read_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the number and the JSON object of each line of a file; skip blank lines.

    Line numbers start at 1. The file may be gzipped (`.gz`).

    Raises:
        TraceError: a line is not a JSON object, or the file is a damaged gzip file.
    """
    for line, value in read_lines(path):
        yield line, _object(value, f"{path}, line {line}")


def read_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the number and the JSON value of each line of a file; skip blank lines.

    Line numbers start at 1. The file may be gzipped (`.gz`).

    Raises:
        TraceError: a line is not JSON, or the file is a damaged gzip file.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json(line, f"{path}, line {number}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path}, after line {number}: damaged gzip file ({error})") from error


def json_object(data: bytes, where: str) -> Record:
    return _object(_json(data, where), where)


def _json(data: bytes, where: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or too deep nesting
        raise TraceError(f"{where}: not JSON ({error})") from error


def _object(value: object, where: str) -> Record:
    if not isinstance(value, dict):
        raise TraceError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return cast(Record, value)


def part(record: Record, name: str, *, where: str) -> Record:
    return _object(record.get(name), f"{where}, {name}")


def integer(record: Record, name: str, *, least: int, where: str) -> int:
    value = record.get(name)
    # a bool is an int in Python, but never a number in a trace
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TraceError(f"{where}: {name} must be an integer of at least {least}, got {value!r}")
    return value


def number(record: Record, name: str, *, where: str, default: float | None = None) -> float:
    value = record.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TraceError(f"{where}: {name} must be a number of at least 0, got {value!r}")
    return float(value)


def text(record: Record, name: str, *, where: str) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TraceError(f"{where}: {name} must be text, got {value!r}")
    return value


def date_ns(date: str) -> int:
    when = datetime.fromisoformat(date)
    return round(when.replace(tzinfo=when.tzinfo or UTC).timestamp() * 1e6) * 1000


def name_of(record: Record, *names: str, where: str) -> int | str | None:
    found = next((record[name] for name in names if record.get(name) is not None), None)
    if found is None or type(found) is int or isinstance(found, str):
        return found
    raise TraceError(f"{where}: {names[0]} must be an integer or text, got {found!r}")


def names_of(record: Record, name: str, *, where: str) -> list[int | str]:
    blocks = record.get(name)
    if not isinstance(blocks, list):
        raise TraceError(f"{where}: {name} must be a list of block ids, got {blocks!r:.60}")
    for block in blocks:
        if type(block) is not int and not isinstance(block, str):
            raise TraceError(f"{where}: a block id must be an integer or text, got {block!r}")
    return blocks
