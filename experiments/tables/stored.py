"""What runs have left in files, read back: a file that is damaged is named in one sentence."""

import json
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file.

    Raises:
        ValueError: it holds anything else.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def read_config(path: Path) -> DictConfig:
    """Return the mapping in the YAML file.

    Raises:
        ValueError: it holds anything else.
    """
    found = _read_yaml(path)
    if not isinstance(found, DictConfig):
        raise ValueError(f"{path} must hold a mapping, got a list")
    return found


def read_list(path: Path) -> ListConfig:
    """Return the list in the YAML file.

    Raises:
        ValueError: it holds anything else.
    """
    found = _read_yaml(path)
    if not isinstance(found, ListConfig):
        raise ValueError(f"{path} must hold a list, got a mapping")
    return found


def _read_yaml(path: Path) -> DictConfig | ListConfig:
    try:
        return OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML ({' '.join(str(error).split())})") from error
    except OSError as error:  # OmegaConf's word for YAML that is neither of these
        if error.errno is not None:
            raise
        raise ValueError(f"{path} must hold a mapping or a list") from error
