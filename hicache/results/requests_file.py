"""The file of a run with one row per request and one column per number.

`requests.parquet` if pyarrow is installed, otherwise `requests.csv.gz`. Columns are the fields of
`RequestRecord`; a field that maps names to numbers becomes one column per name. `ttft_s`, `tpot_s`
and `e2e_s` follow from them.
"""

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache.clock import SECOND_NS
from hicache.observe.reasons import REASONS
from hicache.results.metrics import PREFILL_CAUSES, QUEUE_CAUSES, RequestRecord, Status

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FILES = ("requests.parquet", "requests.csv.gz")
PARTS: dict[str, Iterable[str]] = {
    "computed_for": REASONS,
    "recomputed_for": REASONS,
    "queue_for_ns": QUEUE_CAUSES,
    "prefill_for_ns": PREFILL_CAUSES,
}
SECONDS = ("ttft", "tpot", "e2e")  # derived columns, in seconds
TEXTS = ("session_name", "status", "reason")


class TableRecords(Sequence[RequestRecord]):
    """The records in a table of columns, which takes a fraction of the memory of objects."""

    def __init__(self, table: "pa.Table") -> None:
        self.table = table
        # by the name of a field: a function that returns its value in a row
        self._column = cache(self._read_column)

    @classmethod
    def read(cls, run_dirs: Sequence[Path]) -> "TableRecords":
        """Read the records of several runs from their Parquet files, in order of their ids."""
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        files = [pq.ParquetFile(each / FILES[0]) for each in run_dirs]

        def column(name: str) -> Any:  # one at a time takes half of the memory
            return pa.concat_tables([each.read([name]) for each in files])[name].combine_chunks()

        order = pc.sort_indices(column("id"))
        names = files[0].schema_arrow.names
        return cls(pa.table({name: column(name).take(order) for name in names}))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, place: Any) -> Any:
        return _TableRecord(self._column, range(len(self))[place])

    def _read_column(self, name: str) -> Callable[[int], Any]:
        if name in PARTS:
            keys = {each: f"{name}_{each}" for each in PARTS[name]}
            has = self.table.column_names.__contains__
            own = [(each, self._column(key)) for each, key in keys.items() if has(key)]
            return lambda row: {each: value for each, column in own if (value := column(row))}
        column = self.table.column(name).combine_chunks()
        if name in TEXTS:
            values = column.cast("string").fill_null("").dictionary_encode()
            texts, places = values.dictionary.to_pylist(), values.indices.to_numpy()
            made = [Status(each) for each in texts] if name == "status" else texts
            return lambda row: made[places[row]]
        get: Sequence[Any] = (
            column.to_pylist() if column.null_count else memoryview(column.to_numpy())
        )
        return get.__getitem__


class _TableRecord:
    __slots__ = ("_column", "_row")
    ttft_ns, e2e_ns, tpot_ns = RequestRecord.ttft_ns, RequestRecord.e2e_ns, RequestRecord.tpot_ns

    def __init__(self, column: Callable[[str], Callable[[int], Any]], row: int) -> None:
        self._column, self._row = column, row

    def __getattr__(self, name: str) -> Any:
        return self._column(name)(self._row)


def write_requests(out_dir: Path, records: Sequence[RequestRecord]) -> Path:
    if isinstance(records, TableRecords):
        import pyarrow.parquet as pq

        pq.write_table(records.table, out_dir / FILES[0])
        return out_dir / FILES[0]
    columns = columns_of(records)
    if find_spec("pyarrow") is None:
        return _write_csv(out_dir / FILES[1], columns)
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {name: _array(name, values) for name, values in columns.items()}
    pq.write_table(pa.table(table), out_dir / FILES[0])
    return out_dir / FILES[0]


def _array(name: str, values: Sequence[Any]) -> "pa.Array":
    # `pa.array` would import pandas, which takes longer than a small run
    import pyarrow as pa

    buffers: list[Any]
    if name in TEXTS:
        kind, texts = pa.string(), [(each or "").encode() for each in values]
        buffers = [np.cumsum([0, *map(len, texts)], dtype=np.int32), b"".join(texts)]
    else:
        is_time = name.removesuffix("_s") in SECONDS
        kind = pa.float64() if is_time else pa.int64()
        buffers = [np.array([each or 0 for each in values], np.float64 if is_time else np.int64)]
    known = np.packbits(np.array([each is not None for each in values], bool), bitorder="little")
    return pa.Array.from_buffers(
        kind, len(values), [pa.py_buffer(each) for each in (known, *buffers)]
    )


def read_requests(run_dir: Path) -> "pd.DataFrame":
    """Return a table of the requests of a stored run, one row per request.

    Raises:
        FileNotFoundError: the directory holds neither `requests.parquet` nor `requests.csv.gz`.
        ValueError: the file is damaged, or lacks a column.
    """
    import pandas as pd

    file = next((run_dir / name for name in FILES if (run_dir / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{run_dir} holds neither {FILES[0]} nor {FILES[1]}")
    try:
        table = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # pyarrow, pandas, gzip and zlib have errors of their own
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    if "peer_hit_len" not in table:  # the run of an earlier version
        table["peer_hit_len"] = 0
    for name in (item.name for item in fields(RequestRecord) if item.name not in PARTS):
        if name not in table or (name not in TEXTS and table[name].dtype.kind not in "iuf"):
            # a column without any value has the type of objects
            if name in table and table[name].isna().all():
                continue
            raise ValueError(f"{file} lacks a column of numbers {name}")
    return table


def has_requests(run_dir: Path) -> bool:
    return any((run_dir / name).is_file() for name in FILES)


def columns_of(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for item in fields(RequestRecord):
        values = [getattr(record, item.name) for record in records]
        if item.name not in PARTS:
            columns[item.name] = values
            continue
        if PARTS[item.name] is REASONS and not any(values):
            continue  # the run was not explained
        for part in PARTS[item.name]:
            columns[f"{item.name}_{part}"] = [value.get(part, 0) for value in values]
    for name in SECONDS:
        times_ns = [getattr(record, f"{name}_ns") for record in records]
        columns[f"{name}_s"] = [None if ns is None else ns / SECOND_NS for ns in times_ns]
    return columns


def _write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = io.StringIO(newline="")
    writer = csv.writer(rows)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    # neither time nor file name in the header, so equal runs give equal bytes
    path.write_bytes(gzip.compress(rows.getvalue().encode(), mtime=0))
    return path
