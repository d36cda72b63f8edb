"""Registers the config schema with Hydra, and converts Hydra's config to our dataclasses.

Hydra cannot compose over frozen dataclasses (OmegaConf marks them read-only), so `register` clears
that mark; `to_config` returns the frozen classes and runs their checks.
"""

import pickle
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hicache.config import WORKLOADS, ExperimentConfig, WorkloadConfig
from hicache.models import HardwareConfig, ModelConfig
from hicache.models.hugging_face import read_model
from hicache.models.own_table import read_table
from hicache.models.shapes import least_tp
from hicache.results.tracking import plain
from hicache.runs.grid import subdir
from hicache.runs.machine_file import machine_overrides
from hicache.runs.stored import flat, read_yaml
from hicache.secret import refuse_secrets

CONF = Path(__file__).parents[1] / "conf"
# knobs that replace a whole group file, and the option that selects them
IMPLIED = {"model.from_hf": "model=from_hf", "workload.path": "workload=trace"}
# an experiment chooses a workload, whose kind of trace a path does not change
REPLACES = {"workload.path": "experiment"}
QUIET_RAY = [  # no dashboard, no worker logs in the driver's output
    f"+hydra.launcher.ray.init.{key}=false" for key in ("include_dashboard", "log_to_driver")
]


@cache
def config_of(*overrides: str) -> ExperimentConfig:
    """Return the settings that the command `hicache run OVERRIDES` would use.

    Each override has the form `group.name=value`. Settings without an override have their default.

    Raises:
        ValueError: a setting is unknown, required but missing, or has an invalid value.
    """
    # composing is slow, so do it once for each choice of files, and set values in a copy
    told = [_parsed(each) for each in with_implied(overrides)]
    values = [each for each in told if is_value(each)]
    files = [str(each.input_line) for each in told if each not in values]
    config = pickle.loads(_composed(*files))
    try:
        for each in values:
            OmegaConf.update(config, each.key_or_group, each.value())
    except OmegaConfBaseException:  # Hydra refuses it too, with a better message
        config = pickle.loads(_composed(*(str(each.input_line) for each in told)))
    return to_config(config)


def grid_of(*overrides: str) -> dict[str, str]:
    """Return the grid of an experiment that `overrides` names, without what they set themselves.

    The result has an override with all values, such as `seed=0,1,2`, for each setting of the grid.
    """
    told = [_parsed(each) for each in overrides]
    names = {each.key_or_group for each in told}
    if "experiment" not in names:
        return {}
    files = [str(each.input_line) for each in told if not is_value(each)]
    grid = pickle.loads(_composed(*files, with_hydra=True)).hydra.sweeper.params or {}
    return {key: f"{key}={value}" for key, value in grid.items() if key not in names}


@cache
def _parsed(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


@cache
def _composed(*overrides: str, with_hydra: bool = False) -> bytes:
    # pickled, since reading a pickle takes a fifth of the time of a deep copy
    register()
    ready = GlobalHydra.instance().is_initialized()  # true inside `experiments.run`
    with nullcontext() if ready else initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", list(overrides), return_hydra_config=with_hydra)
    return pickle.dumps(composed)


def is_value(override: Override) -> bool:
    key = override.key_or_group
    is_file = key.startswith("hydra") or (CONF / key).is_dir() or override.package is not None
    changes = override.type is OverrideType.CHANGE and not override.is_sweep_override()
    return changes and not is_file


def with_implied(overrides: Sequence[str]) -> list[str]:
    typed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    refuse_secrets(typed)  # Hydra would write them down
    if (machine := typed.get("hardware", "")).endswith(".yaml"):
        at = [*overrides].index(f"hardware={machine}")
        told = machine_overrides(Path(machine))
        overrides = [*overrides[:at], *told, *overrides[at + 1 :]]
    implied = [
        option
        for knob, option in IMPLIED.items()
        if knob in typed and not typed.keys() & {option.partition("=")[0], REPLACES.get(knob)}
    ]
    if "hydra/launcher=ray" in overrides:
        implied += QUIET_RAY
    return [*overrides, *implied]  # at the end, since argparse wants overrides to be adjacent


@cache
def register() -> None:
    store = ConfigStore.instance()
    root = _writable(ExperimentConfig)
    for key in root.model:  # each model's file gives every value; missing values are derived
        root.model[key] = MISSING
    store.store(name="schema", node=root)
    store.store(group="model", name="schema", node=_writable(ModelConfig))
    for kind in {*WORKLOADS.values()}:
        store.store(group="workload", name=kind.__name__, node=_writable(kind))
    # separates runs that start in the same microsecond; cached: one value per sweep
    OmegaConf.register_new_resolver(
        "run_id", lambda: secrets.token_hex(3), use_cache=True, replace=True
    )
    OmegaConf.register_new_resolver("job_dir", subdir, replace=True)


def to_config(cfg: DictConfig) -> ExperimentConfig:
    """Check the settings that Hydra composed, and convert them to frozen dataclasses.

    Raises:
        ValueError: a setting is unknown, required but missing, or has an invalid value.
    """
    _override_curves(cfg)
    _derive_model(cfg)
    try:
        return _frozen(cfg)
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(OmegaConf.missing_keys(cfg)))
        raise ValueError(f"missing value: set {missing}") from error


def stored_config(file: Path) -> ExperimentConfig:
    """Read the settings of a stored run from its file `config.yaml`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file has a setting that this version of the program does not know, or a
            reference such as `${oc.env:HOME}`, which no run writes.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file.parent} is not a run directory: it has no {file.name}")
    stored = read_yaml(file, dict)
    references = [key for key, value in flat(stored).items() if "${" in str(value)]
    if references:
        raise ValueError(f"{file}: {references[0]} holds a reference (${{...}}), not a value")
    cfg = _writable(ExperimentConfig)
    kind = flat(stored).get("workload.kind")
    if kind in WORKLOADS:
        cfg.workload = _writable(WORKLOADS[kind])
    try:
        cfg.merge_with(stored)
    except ConfigKeyError as error:
        raise ValueError(
            f"{file.parent} was made by another release of hicache, with other settings "
            f"({str(error).partition(chr(10))[0]}): explain needs that release, compare does not"
        ) from error
    return _frozen(cfg)


def _frozen(cfg: DictConfig) -> ExperimentConfig:
    _refuse_unknown(cfg, ExperimentConfig, "")
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, ExperimentConfig)
    refuse_secrets(plain(config))
    _restore_tuples(config)
    return config


def known_keys(schema: type = ExperimentConfig, prefix: str = "") -> list[str]:
    assert is_dataclass(schema)
    keys: list[str] = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if isinstance(item.type, type) and is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    if schema is WorkloadConfig:  # and what only some kinds of workloads have
        own = (key for kind in WORKLOADS.values() for key in known_keys(kind, prefix))
        keys = [*dict.fromkeys([*keys, *own])]
    return keys


def _derive_model(cfg: DictConfig) -> None:
    model = cfg.model
    if OmegaConf.is_missing(model, "from_hf"):
        raise ValueError("missing value: set model.from_hf to the path of a config.json")
    if model.from_hf is None:
        return
    given = {str(key): model[key] for key in model if not OmegaConf.is_missing(model, key)}
    if len(given) == len(model):
        raise ValueError(
            f"model.from_hf={model.from_hf} and model={model.name} name two models: leave out one"
        )
    OmegaConf.set_readonly(model, False)  # noqa: FBT003 - OmegaConf's signature
    derived = read_model(Path(model.from_hf), given)
    hardware = OmegaConf.to_object(cfg.hardware)
    assert isinstance(hardware, HardwareConfig)
    model.merge_with({**asdict(derived), "default_tp": least_tp(derived, hardware), **given})


def _override_curves(cfg: DictConfig) -> None:
    if cfg.hardware.table is None:
        return
    OmegaConf.set_readonly(cfg.hardware, False)  # noqa: FBT003 - OmegaConf's signature
    for name, measured in read_table(Path(cfg.hardware.table)).items():
        cfg.hardware[name].merge_with(asdict(measured))


def _refuse_unknown(cfg: DictConfig, schema: type, prefix: str) -> None:
    # the plus in `+cache.typo=1` tells Hydra that the key is new, so Hydra accepts it
    assert is_dataclass(schema)
    types = {item.name: item.type for item in fields(schema)}
    for key in map(str, cfg):
        if key not in types:
            raise ValueError(f"unknown knob {prefix}{key}")
        child = WORKLOADS.get(str(cfg[key].get("kind"))) if key == "workload" else types[key]
        if isinstance(child, type) and is_dataclass(child) and isinstance(cfg[key], DictConfig):
            _refuse_unknown(cfg[key], child, f"{prefix}{key}.")


def _writable(schema: type) -> DictConfig:
    # values are not used elsewhere, so copying each one would only take time
    node: DictConfig = OmegaConf.structured(schema, flags={"no_deepcopy_set_nodes": True})
    _thaw(node)
    return node


def _thaw(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, False)  # noqa: FBT003 - OmegaConf's signature
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)  # noqa: FBT003 - likewise; the user's own keys
    for key in node:
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _thaw(node[key])


def _restore_tuples(config: object) -> None:
    # OmegaConf has no tuples: it returns every sequence as a list
    assert is_dataclass(config)
    for item in fields(config):
        value = getattr(config, item.name)
        if get_origin(item.type) is tuple and isinstance(value, str):  # what a reference names
            raise ValueError(f"{item.name} must be a list, not {value!r}")
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(config, item.name, value)
        for child in value if isinstance(value, tuple) else (value,):
            if is_dataclass(child):
                _restore_tuples(child)
