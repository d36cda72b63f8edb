"""What Hydra must know of the configuration, and the way from its config to ours.

Frozen dataclasses cannot be composed over (OmegaConf marks them read-only), so the schemas are
stored with that mark cleared; `to_config` gives the frozen classes back, with their checks run.
"""

import copy
import secrets
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hicache.config import ExperimentConfig

CONF = Path(__file__).resolve().parents[2] / "conf"


@cache
def config_of(*overrides: str) -> ExperimentConfig:
    """What `python -m experiments.run OVERRIDES` would run.

    Hydra composes once for each choice of files, which takes long, and values are set in a copy.

    Raises:
        ValueError: a knob has a value it cannot have, has none and needs one, or does not exist.
    """
    told = OverridesParser.create().parse_overrides(list(overrides))
    values = [each for each in told if _is_value(each)]
    config = copy.deepcopy(
        _composed(*(str(each.input_line) for each in told if each not in values))
    )
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return to_config(config)


@cache
def _composed(*files: str) -> DictConfig:
    register()
    ready = GlobalHydra.instance().is_initialized()  # inside `experiments.run` it is
    with nullcontext() if ready else initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(files))


def _is_value(override: Override) -> bool:
    is_file = override.key_or_group.startswith("hydra") or (CONF / override.key_or_group).is_dir()
    return not (is_file or override.is_sweep_override())


@cache
def register() -> None:
    """Tell Hydra the type of every group, as its option `schema`, and of the root."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_writable(ExperimentConfig))
    for group in fields(ExperimentConfig):
        if isinstance(group.type, type) and is_dataclass(group.type):
            store.store(group=group.name, name="schema", node=_writable(group.type))
    # two runs that start in the same microsecond keep apart; cached: one value for a whole sweep
    OmegaConf.register_new_resolver(
        "run_id", lambda: secrets.token_hex(3), use_cache=True, replace=True
    )


def to_config(cfg: DictConfig) -> ExperimentConfig:
    """The frozen dataclasses of a composed config.

    Raises:
        ValueError: a knob has a value it cannot have, has none and needs one, or does not exist.
    """
    missing = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("hydra"))
    if missing:
        raise ValueError(f"no value was given for {', '.join(missing)}")
    _refuse_unknown(cfg, ExperimentConfig, "")
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, ExperimentConfig)
    _restore_tuples(config)
    return config


def known_keys(schema: type = ExperimentConfig, prefix: str = "") -> list[str]:
    """Every knob and group there is, as `group.knob`."""
    assert is_dataclass(schema)
    keys: list[str] = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if isinstance(item.type, type) and is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    return keys


def _refuse_unknown(cfg: DictConfig, schema: type, prefix: str) -> None:
    # `+cache.typo=1` gets past Hydra, which is told by the plus that the key is meant to be new
    assert is_dataclass(schema)
    types = {item.name: item.type for item in fields(schema)}
    for key in map(str, cfg):
        if key not in types:
            raise ValueError(f"there is no knob {prefix}{key}")
        child = types[key]
        if isinstance(child, type) and is_dataclass(child) and isinstance(cfg[key], DictConfig):
            _refuse_unknown(cfg[key], child, f"{prefix}{key}.")


def _writable(schema: type) -> DictConfig:
    node: DictConfig = OmegaConf.structured(schema)
    _thaw(node)
    return node


def _thaw(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, False)  # noqa: FBT003 - OmegaConf's signature
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)  # noqa: FBT003 - likewise; its keys are the user's own
    for key in node:
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _thaw(node[key])


def _restore_tuples(config: object) -> None:
    # OmegaConf knows no tuples: it hands every sequence back as a list
    assert is_dataclass(config)
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(config, item.name, value)
        for child in value if isinstance(value, tuple) else (value,):
            if is_dataclass(child):
                _restore_tuples(child)
