"""Derives the shape of a model from its published `config.json`.

The module reads what decides bytes and work: the kind of every layer, heads, states, experts and
the format of weights. Parameters are those of matrices. Norms, biases and convolutions (at most 0.1
%) are left out, and so are image towers and layers that predict further tokens. An unknown model
type or an impossible number raises an error that names it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hicache.models.compressed import compressed_parts, index_keys
from hicache.models.config_file import (
    SWA_HEADS,
    ConfigFile,
    blocks_of,
    index_layers,
    layer_words,
)
from hicache.models.hybrids import complete
from hicache.models.plausible import check_shape
from hicache.models.shapes import ModelConfig, tier_shares


class _Heads(NamedTuple):
    query: int
    kv: int
    head_dim: int
    value_dim: int


def read_model(path: Path, given: Mapping[str, object]) -> ModelConfig:
    """Read a model's config.json and return the model's shape.

    `path` is the file or its folder. Fields in `given` replace those from the file.

    Raises:
        ValueError: there is no such file, the model type is unknown, or a number is impossible.
    """
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ValueError(f"model.from_hf: file {path} does not exist")
    config = _json_object(path)
    # ModelOpt keeps it in this file
    beside = path.with_name(f"{path.name.removesuffix('config.json')}hf_quant_config.json")
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _json_object(beside).get("quantization", {})
    name = (
        path.resolve().parent.name if path.stem == "config" else path.stem.removesuffix("_config")
    )
    return derive_model(config, {"name": name, "source": str(path), **given})


def _json_object(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model.from_hf: {path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"model.from_hf: {path} must contain a JSON object, got {type(found).__name__}"
        )
    return found


def derive_model(config: Mapping[str, object], given: Mapping[str, object]) -> ModelConfig:
    """Return the model's shape that the contents of a config.json describe.

    Fields in `given` replace those from `config`.

    Raises:
        ValueError: the model type is unknown, or a number is impossible.
    """
    file = ConfigFile(config, f"model.from_hf: {given.get('source', 'config.json')}")
    complete(file)
    words = layer_words(file)
    indexed = index_layers(file, len(words))
    hidden = file.count("hidden_size")
    vocabulary = file.count("vocab_size") * hidden
    inputs = file.count("hidden_size_per_layer_input", default=0, least=0)
    derived: dict[str, object] = {
        "max_len": file.count("max_position_embeddings"),
        "pattern": _shortest(_marked(words, indexed, shares="kv_lora_rank" in file.values)),
        "num_layers": len(words),
        "num_full_layers": sum("F" in word.upper() for word in words),
        "num_swa_layers": sum("S" in word.upper() for word in words),
        "num_mamba_layers": sum("M" in word or "D" in word for word in words),
        "hidden_size": hidden,
        "head_params": vocabulary,
        "embedding_params": (0 if file.has("tie_word_embeddings") else vocabulary)
        + len(words) * inputs * file.count("vocab_size_per_layer_input", default=0, least=0),
        "blocks_per_layer": 1 if file.kind == "nemotron_h" else 2,
    }
    dense = 3 * len(words) * hidden * inputs  # computed once; a gate and a projection in each layer
    for part in (_attention(file, words, sum(indexed)), _recurrent(file, words), _mlp(file, words)):
        dense += part.pop("dense_params")
        derived |= part
    derived |= {"dense_params": dense, **_bytes(file, given), **given}
    if "parts" not in given:
        element_bytes = float(str(derived.get("kv_dtype_bytes", 2)))
        derived |= index_keys(file, element_bytes) if any(indexed) else {}
        if file.kind == "deepseek_v4":
            derived["parts"] = compressed_parts(file, element_bytes)
    try:
        model = ModelConfig(**derived)  # type: ignore[arg-type]
        check_shape(model)
        return replace(model, **{**tier_shares(model), **given})  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{file.where}: {error}") from error


def _marked(words: list[str], indexed: list[bool], *, shares: bool) -> list[str]:
    # marks sparse attention (t) and index keys (I); `shares`: layers without index keys reuse the
    # choice of an earlier layer
    if not any(indexed):
        return words
    is_sparse = [shares or has for has in indexed]
    return [
        "FtI" if has else "Ft" if sparse else word
        for word, has, sparse in zip(words, indexed, is_sparse, strict=True)
    ]


def _shortest(words: list[str]) -> str:
    num = len(words)
    period = next(n for n in range(1, num + 1) if all(words[i] == words[i % n] for i in range(num)))
    return " ".join(words[:period])


def _attention(file: ConfigFile, words: list[str], num_index_layers: int) -> dict[str, int]:
    hidden = file.count("hidden_size")
    query = file.count("num_attention_heads")
    if "kv_lora_rank" in file.values:
        return _latent_attention(file, words.count("F"), num_index_layers)
    if file.kind == "deepseek_v4":
        return _compressed_attention(file, words)
    full, swa = _heads(file, hidden, query)
    if "S" in words and swa[2:] != full[2:] and swa.head_dim != swa.value_dim:
        raise ValueError(
            f"{file.where}: window layers with swa_head_dim={swa.head_dim} and swa_v_head_dim="
            f"{swa.value_dim} are not supported with full layers of {full.head_dim} and "
            f"{full.value_dim}"
        )

    def params(heads: _Heads, letter: str, *, has_values: bool) -> int:
        queries = heads.query * heads.head_dim * (2 if file.has("attn_output_gate") else 1)
        values = heads.kv * heads.value_dim if has_values else 0
        num_kept = sum(letter in word for word in words)
        kept = num_kept * (heads.kv * heads.head_dim + values)
        num = num_kept + words.count(letter.lower())
        return hidden * (num * (queries + heads.query * heads.value_dim) + kept)

    found = {
        "num_query_heads": full.query,
        "num_kv_heads": full.kv,
        "head_dim": full.head_dim,
        "value_dim": 0 if full.value_dim == full.head_dim else full.value_dim,
        "dense_params": params(full, "F", has_values=not file.has("attention_k_eq_v"))
        + params(swa, "S", has_values=True),
    }
    if "S" in words:
        restarts = found["window_restarts"] = file.kind == "llama4_text"
        found["window_len"] = file.count("attention_chunk_size" if restarts else "sliding_window")
        found["swa_num_query_heads"] = 0 if swa.query == full.query else swa.query
        found["swa_num_kv_heads"] = 0 if swa.kv == full.kv else swa.kv
        found["swa_head_dim"] = 0 if swa[2:] == full[2:] else swa.head_dim
    return found


def _heads(file: ConfigFile, hidden: int, query: int) -> tuple[_Heads, _Heads]:
    if query > hidden:
        raise ValueError(
            f"{file.where}: num_attention_heads must be at most hidden_size={hidden}, got {query}"
        )
    head_dim = file.count("head_dim", "attention_head_dim", default=hidden // query)
    kv = file.count("num_key_value_heads", "num_attention_groups", default=query)
    plain = _Heads(query, kv, head_dim, file.count("v_head_dim", default=head_dim))
    full = swa = plain
    if "global_head_dim" in file.values:  # of the full layers alone
        wide = file.count("global_head_dim")
        if file.has("attention_k_eq_v"):  # without it, the number of their KV heads is not read
            kv = file.count("num_global_key_value_heads", default=kv)
        full = _Heads(query, kv, wide, wide)
    if any(name in file.values for name in SWA_HEADS):
        query, kv, head_dim = (
            file.count(name, default=number)
            for name, number in zip(SWA_HEADS, plain[:3], strict=True)
        )
        swa = _Heads(query, kv, head_dim, file.count("swa_v_head_dim", default=plain.value_dim))
    if "attention_other_setting" in file.values:  # Step-3.5: of the window layers
        other = file.group("attention_other_setting")
        other_type = other.values.get("attention_type", "sliding_attention")
        if other_type != "sliding_attention":
            raise ValueError(
                f"{other.where}: attention_type must be sliding_attention, got {other_type!r}"
            )
        head_dim = other.count("head_dim", default=head_dim)
        swa = _Heads(
            other.count("num_attention_heads"),
            other.count("num_key_value_heads", "num_attention_groups", default=kv),
            head_dim,
            head_dim,
        )
    for heads in (full, swa):
        if heads.query % heads.kv:
            raise ValueError(
                f"{file.where}: the number of query heads must be a multiple of that of KV heads, "
                f"got {heads.query} and {heads.kv}"
            )
    return full, swa


def _latent_attention(file: ConfigFile, num_layers: int, num_index_layers: int) -> dict[str, int]:
    hidden, query = file.count("hidden_size"), file.count("num_attention_heads")
    latent, rope = file.count("kv_lora_rank"), file.count("qk_rope_head_dim")
    head_dim = file.count("qk_nope_head_dim") + rope
    value_dim = file.count("v_head_dim")
    low = file.count("q_lora_rank", default=0, least=0)
    queries = low * (hidden + query * head_dim) if low else hidden * query * head_dim
    kept = hidden * (latent + rope) + latent * query * (head_dim - rope + value_dim)
    index_dim = file.count("index_head_dim", default=0, least=0)
    index_heads = file.count("index_n_heads", default=0, least=0)
    gates = 2 if file.has("mla_use_output_gate") else 1  # the output's projection, and its gate
    index = index_heads * (low * index_dim + hidden) + hidden * index_dim
    return {
        "num_query_heads": query,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "latent_dim": latent + rope,
        "dense_params": num_layers * (queries + kept + gates * query * value_dim * hidden)
        + num_index_layers * index,
    }


def _compressed_attention(file: ConfigFile, words: list[str]) -> dict[str, int]:
    # DeepSeek-V4: a window of one latent vector, and compressed KV. Each entry of 4 tokens needs
    # two projections per token, because neighboring entries overlap
    hidden, query, dim = (file.count(x) for x in ("hidden_size", "num_attention_heads", "head_dim"))
    low, low_out = file.count("q_lora_rank"), file.count("o_lora_rank")
    index_dim, index_heads = file.count("index_head_dim"), file.count("index_n_heads")
    own = low * (hidden + query * dim) + hidden * dim
    own += query * dim * low_out + low_out * file.count("o_groups") * hidden
    index = index_heads * (low * index_dim + hidden) + 4 * hidden * index_dim
    return {
        "num_query_heads": query,
        "head_dim": dim,
        "num_kv_heads": 1,
        "window_len": file.count("sliding_window"),
        "swa_head_dim": dim,
        "swa_latent_dim": dim,
        "dense_params": len(words) * own
        + words.count("SC") * (4 * hidden * dim + index)
        + words.count("SH") * 2 * hidden * dim,
    }


def _recurrent(file: ConfigFile, words: list[str]) -> dict[str, int]:
    hidden = file.count("hidden_size")
    state_bytes = file.dtype_bytes("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="float32")
    num_layers = sum("M" in word or "D" in word for word in words)
    if any("M" in word for word in words):
        heads, head_dim = file.count("mamba_num_heads"), file.count("mamba_head_dim")
        state, groups = file.count("ssm_state_size", least=0), file.count("n_groups", least=0)
        inner = heads * head_dim
        params = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
        found = {"recurrent_groups": groups, "conv_taps": file.count("conv_kernel")}
    elif num_layers and file.kind in ("kimi_linear", "bailing_hybrid"):
        group = file.group("linear_attn_config") if file.has("linear_attn_config") else file
        heads = group.count("num_heads", "linear_num_heads")
        head_dim = group.count("linear_head_dim", "head_dim")
        state = head_dim
        inner = heads * head_dim
        gate = hidden * inner if group.has("use_full_rank_gate") else (hidden + inner) * head_dim
        # queries, keys, values and output; the forget and output gates; beta
        params = 4 * hidden * inner + (hidden + inner) * head_dim + gate + hidden * heads
        taps = group.count("short_conv_kernel_size", "linear_conv_kernel_dim")
        found = {"recurrent_key_heads": heads, "conv_taps": taps}
    elif "D" in words:
        heads, head_dim = file.count("linear_num_value_heads"), file.count("linear_value_head_dim")
        state, keys = file.count("linear_key_head_dim"), file.count("linear_num_key_heads")
        if heads % keys:
            raise ValueError(
                f"{file.where}: linear_num_value_heads must be a multiple of "
                f"linear_num_key_heads={keys}, got {heads}"
            )
        inner = heads * head_dim
        params = hidden * (2 * keys * state + 2 * inner + 2 * heads) + inner * hidden
        found = {"recurrent_key_heads": keys, "conv_taps": file.count("linear_conv_kernel_dim")}
    else:
        return {"dense_params": 0}
    return found | {
        "recurrent_heads": heads,
        "recurrent_head_dim": head_dim,
        "recurrent_state_dim": state,
        "state_dtype_bytes": state_bytes,
        "dense_params": num_layers * file.count("recurrent_params", default=params),
    }


def _mlp(file: ConfigFile, words: list[str]) -> dict[str, int]:
    hidden = file.count("hidden_size")
    matrices = 2 if file.kind == "nemotron_h" else 3
    moe_layers = _moe_layers(file, words)
    mlp_layers = len(words) - moe_layers
    if file.kind == "nemotron_h":  # each layer is one block
        mlp_layers = sum(block in ("-", "mlp") for block in blocks_of(file))
    if file.has("enable_moe_block"):  # a dense MLP beside the experts
        mlp_layers = len(words)
    dense = 0
    if mlp_layers:
        width = file.count("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
        if file.has("use_double_wide_mlp"):  # layers that read the KV of earlier layers
            mlp_layers += file.count("num_kv_shared_layers", default=0, least=0)
        dense += mlp_layers * matrices * hidden * width
    if not moe_layers:
        return {"dense_params": dense}
    experts = file.count(*EXPERTS)
    chosen = file.count(
        "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k"
    )
    width = file.count("moe_intermediate_size", "intermediate_size")
    # dimension of a token inside the experts
    latent = file.count("moe_latent_size", "routed_expert_hidden_size", default=0)
    shared = file.count(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        default=width * file.count("n_shared_experts", "num_shared_experts", default=0, least=0),
        least=0,
    )
    beside = hidden * experts + matrices * hidden * shared + 2 * hidden * latent
    return {
        "num_moe_layers": moe_layers,
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_params": matrices * (latent or hidden) * width,
        "expert_width": width,
        "expert_matrices": matrices,
        "dense_params": dense + moe_layers * beside,
    }


# bytes of an element of KV; None means that the model's own format is kept
KV_BYTES = {
    **dict.fromkeys(("auto", "none", "bf16", "bfloat16", "fp16", "float16", "16"), None),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "8"), 1),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _moe_layers(file: ConfigFile, words: list[str]) -> int:
    if not any(file.has(name) for name in EXPERTS):
        return 0
    if file.kind == "nemotron_h":
        return sum(block in ("E", "moe") for block in blocks_of(file))
    if isinstance(file.values.get("mlp_layer_types"), list):
        said = file.each_layer("mlp_layer_types", len(words))
        return sum(entry in ("sparse", "moe", "hash_moe") for entry in said)
    if isinstance(file.values.get("moe_layer_freq"), list):
        return sum(entry == 1 for entry in file.each_layer("moe_layer_freq", len(words)))
    dense = file.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"{file.where}: mlp_only_layers must be a list, got {dense!r}")
    listed = file.values.get("moe_layers", file.values.get("moe_layers_enum"))
    if isinstance(listed, str):  # Step-3.5
        listed = [each for each in listed.split(",") if each.strip()]
    if isinstance(listed, list):
        return len(listed)
    step = file.count(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1
    )
    first = file.count("first_k_dense_replace", default=0, least=0)
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(first, len(words)))


def _bytes(file: ConfigFile, given: Mapping[str, object]) -> dict[str, float]:
    plain = float(file.dtype_bytes("torch_dtype", "dtype", default="bfloat16"))
    found = {"dense_param_bytes": plain, "expert_param_bytes": plain}
    if plain == 4:
        found |= {"kv_dtype_bytes": 4, "conv_dtype_bytes": 4}
    if "quantization_config" not in file.values:
        return found
    quantised = file.values["quantization_config"]
    if not isinstance(quantised, Mapping):
        raise ValueError(f"{file.where}: quantization_config must be an object, got {quantised!r}")
    word = quantised.get("quant_algo")
    method = word or quantised.get("quant_method")
    if method in ("fp8", "FP8"):
        found = {"dense_param_bytes": 1.0, "expert_param_bytes": 1.0}
    elif method == "mxfp4":  # only the experts: 4 bits, and a scale byte per 32 weights
        found["expert_param_bytes"] = 0.53125
    elif quantised.get("quant_algo", "") is not None and not found.keys() <= given.keys():
        # ModelOpt writes null if it quantizes only the KV
        raise ValueError(
            f"{file.where}: quantization_config.{'quant_algo' if word else 'quant_method'}: "
            f"unknown quantization method {method or '(no quant_method)'}: "
            f"set model.dense_param_bytes and model.expert_param_bytes"
        )
    return found if "kv_dtype_bytes" in given else found | _kv_bytes(file.where, quantised)


def _kv_bytes(where: str, quantised: Mapping[object, object]) -> dict[str, float]:
    # the precision of KV, by any field of it that is not empty
    for name in (name for name in quantised if str(name).startswith("kv_") and quantised[name]):
        said = quantised[name]
        word = said.get("num_bits", "an object") if isinstance(said, Mapping) else said
        if str(word).lower() not in KV_BYTES:
            raise ValueError(
                f"{where}: quantization_config.{name} may be FP8, INT8, BF16, FP16 or auto, got "
                f"{word!r:.60}: set model.kv_dtype_bytes"
            )
        size = KV_BYTES[str(word).lower()]
        return {} if size is None else {"kv_dtype_bytes": size}
    return {}
