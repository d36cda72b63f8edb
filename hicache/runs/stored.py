"""Reads the files of stored runs, which may come from anyone.

The files are data: nothing in them is resolved, imported or executed. Each reader has bounds, and
an error names the damaged file in one sentence.
"""

import json
import sys
from pathlib import Path
from typing import Any, TypeVar

import yaml

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.txt"
MOST_BYTES = 4 << 20
MOST_NESTED = 20  # mappings and lists inside each other
Value = str | int | float | bool | None
Stored = TypeVar("Stored", dict[str, Any], list[Any])


def is_finished(out_dir: Path) -> bool:
    return (out_dir / SUMMARY_FILE).is_file() and not (out_dir / ERROR_FILE).exists()


def read_json(path: Path) -> dict[str, Any]:
    contents = _contents(path)
    try:
        found = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def read_summary(run_dir: Path) -> dict[str, float]:
    """Read the metrics of a finished run.

    Raises:
        ValueError: a metric is no finite number.
    """
    file = run_dir / SUMMARY_FILE
    found = read_json(file)
    for name, value in found.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and abs(value) <= sys.float_info.max):
            raise ValueError(f"{file}: {name} must be a finite number, got {value!r:.40}")
    return found


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


def _contents(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with path.open("rb") as file:
        contents = file.read(MOST_BYTES + 1)
    if len(contents) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes")
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
