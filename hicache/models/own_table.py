"""Reads a machine's curves and figures from a CSV table of the user's own measurements.

curve,size,rate,source
    kernel_to_device,4096,12.6e9,bench of 2026-01-08
    kernel_to_device,65536,42e9,
    pcie_bandwidth,,50e9,

Each row is one point of a curve, or a figure, which has no size. A curve in the table replaces the
machine's whole curve.
"""

import csv
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from hicache.models.machines import Figure, HardwareConfig, RateTable

COLUMNS = ("curve", "size", "rate")


def read_table(path: Path) -> dict[str, RateTable | Figure]:
    """Read a CSV table of the user's own measurements of a machine.

    Return rate curves and single numbers by their field names in `HardwareConfig`.

    Raises:
        ValueError: the file is missing or empty, or a row is wrong. For a row, the message has file
            and line.
    """
    if not path.is_file():
        raise ValueError(f"hardware.table: file {path} does not exist")
    points: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, RateTable | Figure] = {}
    kinds = {item.name: item.type for item in fields(HardwareConfig)}
    named = [name for name, kind in kinds.items() if kind in (RateTable, Figure)]
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"hardware.table: {path} is not UTF-8 ({error})") from error
    table = csv.DictReader(lines)
    for row in _rows(table, path):
        where = f"hardware.table: {path}, line {table.line_num}"
        curve = row["curve"]
        if curve not in named:
            raise ValueError(f"{where}: curve must be one of {', '.join(named)}, got {curve!r}")
        source = row.get("source") or str(path)
        rate = _number(row["rate"], f"{where}: rate")
        if kinds[curve] is Figure:
            if curve in found or (row["size"] or "").strip():
                raise ValueError(
                    f"{where}: {curve} is a single number, so its row must have no size "
                    "and appear once"
                )
            found[curve] = Figure(value=rate, source=source, status="measured")
            continue
        points.setdefault(curve, []).append((_number(row["size"], f"{where}: size"), rate))
        size, rates = zip(*sorted(points[curve]), strict=True)
        try:
            found[curve] = RateTable(size=size, rate=rates, source=source, status="measured")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not found:
        raise ValueError(f"hardware.table: {path} has no rows")
    return found


def _rows(table: "csv.DictReader[str]", path: Path) -> Iterator[dict[str, str | None]]:
    try:
        if not set(COLUMNS) <= set(table.fieldnames or ()):
            raise ValueError(
                f"hardware.table: {path}, line 1: the columns must include {', '.join(COLUMNS)}"
            )
        yield from table
    except csv.Error as error:  # a field of more than 131,072 characters, for example
        raise ValueError(f"hardware.table: {path}, line {table.line_num + 1}: {error}") from error


def _number(text: str | None, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{where} must be a positive number, got {text!r}")
    return number
