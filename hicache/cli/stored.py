"""Reads the files of stored runs; an error names the damaged file in one sentence."""

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.txt"
Config = TypeVar("Config", DictConfig, ListConfig)


def is_finished(out_dir: Path) -> bool:
    return (out_dir / SUMMARY_FILE).is_file() and not (out_dir / ERROR_FILE).exists()


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def read_yaml(path: Path, wanted: type[Config]) -> Config:
    try:
        found = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML ({' '.join(str(error).split())})") from error
    except OSError as error:
        if error.errno is not None:
            raise
        found = None  # OmegaConf reads only mappings and lists
    if not isinstance(found, wanted):
        raise ValueError(f"{path} must hold a {'mapping' if wanted is DictConfig else 'list'}")
    return found
