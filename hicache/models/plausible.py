"""Plausibility checks of the numbers of a model and a machine.

Parameters, bytes and rates decide what a run costs; an error in them gives a wrong but credible
result. The bounds are wide: for models from the smallest size that the heads and experts allow to
more than any published model; for machines from the lowest rates of any machine to ten times the
highest.
"""

from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

from hicache.models.machines import Figure, HardwareConfig, RateTable
from hicache.models.shapes import MOST_LAYERS, LayerKind, ModelConfig

MLP_WIDTH = 16  # in hidden sizes: largest intermediate size; gpt-oss has 1, Gemma 3 4, Falcon 7B 4

LEAST_RATE = 1e6  # per second; no link or device is so slow, but a rate typed in GB/s would be
MOST_RATE = 1e17  # ten times the fastest machine in fp4
CONSTANTS = ("step_s", "extend_s", "kernel_s", "graph_kernel_s", "request_s", "all_reduce_s")
FACTORS = ("prefill_factor", "link_factor")
LEAST = {
    **dict.fromkeys((*CONSTANTS, "activation_bytes"), 0),
    **dict.fromkeys(FACTORS, 0.001),
    "copy_slowdown": 1,
}
MOST_STEP_S = 1000.0  # of one step's constant parts
MOST = {
    **dict.fromkeys(CONSTANTS, MOST_STEP_S),
    **dict.fromkeys((*FACTORS, "copy_slowdown"), 1000.0),
}
MOST_WHOLE = 1 << 20  # of devices, and tokens of a tile
# rates of which 0 means that they are not known, or do not matter
UNKNOWN = ("both_ways_bandwidth", "copy_kernel.")

MOST_NUMBER = 1e18  # of any number of a model or machine
MOST_LEN = 1 << 30
SHARES = ("swa_device_share", "swa_host_share", "mamba_device_share", "mamba_host_share")


def check_machine(hardware: HardwareConfig) -> None:
    """Check that the numbers of a machine are plausible.

    Raises:
        ValueError: a number is out of bounds; the message has the bound.
    """
    for name in ("num_devices", "devices_per_host", "tile_tokens"):
        if not 1 <= getattr(hardware, name) <= MOST_WHOLE:
            raise ValueError(
                f"hardware.{name} must be between 1 and {MOST_WHOLE:,}, got "
                f"{getattr(hardware, name):,}"
            )
    kernel = hardware.copy_kernel
    held = {item.name: getattr(hardware, item.name) for item in fields(hardware)}
    held |= {f"copy_kernel.{item.name}": getattr(kernel, item.name) for item in fields(kernel)}
    for name, value in held.items():
        found: tuple[float, ...] = (value.value,) if isinstance(value, Figure) else ()
        if isinstance(value, RateTable):
            found = value.rate
        if found == (0,) and name.startswith(UNKNOWN):
            continue
        least = LEAST.get(name, LEAST_RATE)
        for number in found:
            if not least <= number < inf:
                what = " (bytes or operations a second)" if least == LEAST_RATE else ""
                raise ValueError(
                    f"hardware.{name} must be a finite number of at least {least:,.0f}{what}, "
                    f"got {number:,}"
                )
            most = MOST.get(name, MOST_RATE)
            if number > most:
                raise ValueError(f"hardware.{name} must be at most {most:g}, got {number:g}")
    _check_finite("hardware", hardware)


def check_shape(model: ModelConfig) -> None:
    """Check that the numbers of a model are plausible and fit each other.

    Raises:
        ValueError: a number is out of bounds; the message has the bounds.
    """
    _check_finite(f"model {model.name}:", model)
    _within(model, **dict.fromkeys(SHARES, (0, 1)), max_len=(1, MOST_LEN), default_tp=(1, 1 << 20))
    sizes = [each.name for each in fields(model) if each.name.endswith(("_heads", "_dim"))]
    _within(model, **dict.fromkeys(sizes, (0, 1 << 20)), blocks_per_layer=(0, MOST_LAYERS))
    full = model.num_holders(LayerKind.full)
    full += sum(model.part_layers(part) for part in model.parts if part.rides_on == "full")
    if not full:
        raise ValueError(
            "full layers with KV of their own: at least 1 wanted, got 0 (models with windows alone "
            "are not supported)"
        )
    _within(model, hidden_size=(1, 1 << 17), num_query_heads=(1, 1 << 12), head_dim=(1, 1 << 12))
    if not model.latent_dim:
        _within(model, num_kv_heads=(1, model.num_query_heads))
        _divides(model, "num_query_heads", model.num_kv_heads)
    _within(model, kv_dtype_bytes=(1, 4), window_len=(0, model.max_len))
    if model.num_mamba_layers:
        bounds = {"recurrent_heads": (1, 1 << 20), "recurrent_head_dim": (1, 1 << 12)}
        _within(model, **bounds, conv_taps=(1, 64))
    least = _attention_params(model)
    most = 2 * least + len(model.layer_words) * 3 * MLP_WIDTH * model.hidden_size**2
    inner = model.recurrent_heads * model.recurrent_head_dim
    most += 8 * model.num_mamba_layers * model.hidden_size * inner
    _within(model, dense_params=(least, most))
    _divides(model, "head_params", model.hidden_size)
    vocabulary = (0, model.hidden_size << 24)
    _within(model, head_params=vocabulary, embedding_params=vocabulary)
    _within(model, head_params=(2 * model.hidden_size, None))
    _within(model, dense_param_bytes=(0.125, 8), expert_param_bytes=(0.125, 8))
    if model.num_moe_layers:
        _within(model, num_moe_layers=(1, len(model.layer_words)), expert_width=(1, 1 << 20))
        _within(model, expert_matrices=(2, 3), num_experts=(1, 1 << 16))
        inner = model.expert_matrices * model.expert_width
        _divides(model, "expert_params", inner)
        _within(model, expert_params=(inner, inner * model.hidden_size))


def _check_finite(name: str, config: Any) -> None:
    for item in fields(config):
        value = getattr(config, item.name)
        for each in value if isinstance(value, tuple | list) else (value,):
            if is_dataclass(each):
                _check_finite(f"{name}.{item.name}", each)
            elif isinstance(each, int | float) and not 0 <= each <= MOST_NUMBER:
                raise ValueError(
                    f"{name}.{item.name} must be between 0 and {MOST_NUMBER:g}, got {each:g}"
                )


def _attention_params(model: ModelConfig) -> int:
    value_dim = model.value_dim or model.head_dim
    words = "".join(model.layer_words)
    out = model.hidden_size * model.num_query_heads * value_dim
    if model.latent_dim or model.swa_latent_dim:  # queries and keys may come from small matrices
        return words.count("F") * out
    into = model.hidden_size * model.head_dim
    swa_heads = model.swa_num_query_heads or model.num_query_heads
    swa = model.hidden_size * swa_heads * (model.swa_head_dim or model.head_dim)
    full = words.count("F") * (into * (model.num_query_heads + model.num_kv_heads) + out)
    return full + words.count("S") * swa


def _within(model: ModelConfig, **bounds: tuple[float, float | None]) -> None:
    for name, (least, most) in bounds.items():
        value = getattr(model, name)
        if value < least or (most is not None and value > most):
            upper = "" if most is None else f" and at most {most:,}"
            raise ValueError(
                f"model {model.name}: {name} must be at least {least:,}{upper}, got {value:,}"
            )


def _divides(model: ModelConfig, name: str, part: int) -> None:
    value = getattr(model, name)
    if value % part:
        raise ValueError(
            f"model {model.name}: {name} must be a multiple of {part:,}, got {value:,}"
        )
