"""Reads and writes the files of stored runs, which may come from anyone.

The files are data: nothing in them is resolved, imported or executed. Each reader has bounds, and
an error names the damaged file in one sentence.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf._utils import OmegaConfDumper

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.txt"
ROWS_FILE = "metrics.jsonl"
# what a page draws of a row
TOKENS = tuple(f"interval/{name}_tokens" for name in ("device_hit", "host_hit", "storage_hit"))
DRAWN = (
    "time_s",
    *TOKENS,
    "interval/computed_tokens",
    "queue/waiting_count",
    "queue/running_count",
)
MOST_BYTES, MOST_ROW_BYTES = 4 << 20, 256 << 20
MOST_NESTED = 20  # mappings and lists inside each other
Value = str | int | float | bool | None
Stored = TypeVar("Stored", dict[str, Any], list[Any])


def is_finished(out_dir: Path) -> bool:
    return (out_dir / SUMMARY_FILE).is_file() and not (out_dir / ERROR_FILE).exists()


class Numbers(dict[str, float]):
    """Finite numbers by name, from `where`; a missing one is a fault of the file.

    Raises:
        ValueError: a value is no finite number, or a name is missing.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.where = where
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and abs(value) <= sys.float_info.max):
                raise ValueError(f"{where}: {name} must be a finite number, got {value!r:.40}")

    def __missing__(self, name: str) -> float:
        raise ValueError(f"{self.where} lacks {name}")


class _Dumper(yaml.CSafeDumper):  # type: ignore[misc]
    """Writes what `OmegaConf.to_yaml` does, in a tenth of the time."""


_Dumper.add_representer(str, OmegaConfDumper.str_representer)


def yaml_of(values: object) -> str:
    style = {"default_flow_style": False, "allow_unicode": True, "sort_keys": False}
    text: str = yaml.dump(values, Dumper=_Dumper, **style)
    return text


def read_json(path: Path) -> dict[str, Any]:
    return _object(str(path), _contents(path))


def read_summary(run_dir: Path) -> Numbers:
    """Read the metrics of a finished run."""
    file = run_dir / SUMMARY_FILE
    return Numbers(str(file), read_json(file))


def read_rows(run_dir: Path) -> list[Numbers]:
    """Read the measurements of the time intervals of a run, with all that a page draws."""
    file, rows = run_dir / ROWS_FILE, []
    for number, line in enumerate(_contents(file, MOST_ROW_BYTES).splitlines(), 1):
        where = f"{file}, line {number}"
        rows.append(Numbers(where, _object(where, line)))
        for name in DRAWN:
            rows[-1][name]
    return rows


def read_yaml(path: Path, wanted: type[Stored]) -> Stored:
    """Read a YAML file that a run has written, as plain values; `${...}` stays a text.

    Raises:
        ValueError: the file is damaged, or refers to a part of itself (`*name`), which can make a
            few lines as large as memory.
    """
    contents = _contents(path)
    try:
        depth = 0
        for event in yaml.parse(contents, yaml.CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_NESTED:
                raise yaml.YAMLError(f"more than {MOST_NESTED} levels")
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"no run writes the alias *{event.anchor:.40}")
        found = yaml.load(contents, yaml.CSafeLoader)
        _check_plain(found)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, wanted):
        raise ValueError(f"{path} must hold a {'mapping' if wanted is dict else 'list'}")
    return found


def flat(config: object, prefix: str = "") -> dict[str, Value]:
    if not isinstance(config, dict):
        return {prefix: config if isinstance(config, (str, int, float, bool)) else _text(config)}
    keys: dict[str, Value] = {}
    for key, value in config.items():
        keys |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return keys


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value)


def _object(where: str, contents: bytes) -> dict[str, Any]:
    try:
        found = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(found).__name__}")
    return found


def _contents(path: Path, most: int = MOST_BYTES) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with path.open("rb") as file:
        contents = file.read(most + 1)
    if len(contents) > most:
        raise ValueError(f"{path} has more than {most:,} bytes")
    return contents


def _check_plain(value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r:.40} is no text")
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{value!r:.40} is neither text nor number")
