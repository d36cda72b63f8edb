"""Reads a config.json and checks each number.

Models are identified by `model_type`; an unknown type is refused.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

Word = TypeVar("Word")


# with a window and without layer_types, every layer has that window
ALL_IN_WINDOWS = ("mistral", "ministral3", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe")
# without use_sliding_window, these have full attention
OFF_BY_DEFAULT = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
SWA_HEADS = ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim")
OWN_HEADS = (*SWA_HEADS, "swa_v_head_dim", "global_head_dim", "attention_other_setting")
# fields that say which layers have full attention, and the word of the layers between them
EVERY = {
    "full_attention_interval": "D",
    "sliding_window_pattern": "S",
    "no_rope_layer_interval": "S",
}
# fields that list the layers with index keys of their own; the other layers reuse the choice of the
# layer before them
INDEX_WORDS: dict[object, bool] = {"full": True, "F": True, "shared": False, "S": False}
# words of DeepSeek-V4 layers by tokens per entry; 0 means a window alone
RATIO_WORDS = {0: "S", 4: "SC", 128: "SH"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST = 1 << 32  # largest number allowed in a file
# fields outside text_config
OUTER = ("quantization_config", "tie_word_embeddings", "torch_dtype", "dtype")
# fields of MiniMax-M3's sparse_attention_config, by the names that its class gives them
SPARSE_NAMES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "sparse_attention_freq": "sparse_attention_freq",
}


@cache
def known() -> dict[str, Any]:
    """Return what is known of the model types, as `known.yaml` has it."""
    tables: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text())
    tables["defaults"] = {kind: {} for kind in tables["plain"]} | tables["defaults"]
    return tables


class ConfigFile:
    def __init__(self, config: Mapping[str, object], where: str) -> None:
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ValueError(f"{where}: text_config must be an object, got {text!r}")
        self.where = where
        self.kind = _kind(config, text, where)
        defaults = known()["defaults"]
        outer = {name: config[name] for name in OUTER if config.get(name) is not None}
        # null means the same as a missing field
        said = {name: value for name, value in text.items() if value is not None}
        self.values: dict[str, object] = {**defaults[self.kind], **outer, **said}
        if "sparse_attention_config" in said:
            sparse = self.group("sparse_attention_config").values
            for name, theirs in SPARSE_NAMES.items():
                if theirs in sparse:
                    self.values[name] = sparse[theirs]

    def group(self, name: str) -> "ConfigFile":
        held = self.values.get(name)
        if not isinstance(held, Mapping):
            raise ValueError(f"{self.where}: {name} must be an object, got {held!r:.60}")
        return ConfigFile({"model_type": self.kind, **held}, f"{self.where}: {name}")

    def has(self, name: str) -> bool:
        return bool(self.values.get(name))

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer under the first of `names` that the file has.

        Return `default` if the file has none of them.

        Raises:
            ValueError: the file has none of them and `default` is None, or the value is not an
                integer of at least `least`.
        """
        name = next((name for name in names if name in self.values), None)
        if name is None:
            if default is None:
                raise ValueError(f"{self.where}: {' or '.join(names)} is missing")
            return default
        value = self.values[name]
        if type(value) is not int or not least <= value <= MOST:
            raise ValueError(
                f"{self.where}: {name} must be an integer between {least} and {MOST}, got {value!r}"
            )
        return value

    def each_layer(self, name: str, num_layers: int) -> list[object]:
        value = self.values[name]
        if not isinstance(value, list | str) or len(value) != num_layers:
            got = len(value) if isinstance(value, list | str) else repr(value)
            raise ValueError(
                f"{self.where}: {name} must have one entry for each of num_hidden_layers="
                f"{num_layers}, got {got}"
            )
        return list(value)

    def translated(self, name: str, num_layers: int, words: Mapping[object, Word]) -> list[Word]:
        said = self.each_layer(name, num_layers)
        for entry in said:
            if not isinstance(entry, str | int) or entry not in words:
                allowed = ", ".join(map(str, words))
                raise ValueError(f"{self.where}: {name} may contain {allowed}, got {entry!r}")
        return [words[entry] for entry in said]

    def dtype_bytes(self, *names: str, default: str) -> int:
        name = next((name for name in names if name in self.values), None)
        dtype = str(self.values[name]).removeprefix("torch.") if name else default
        if dtype not in DTYPE_BYTES:
            raise ValueError(
                f"{self.where}: {name} must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}"
            )
        return DTYPE_BYTES[dtype]


def _kind(config: Mapping[str, object], text: Mapping[str, object], where: str) -> str:
    defaults, refused = known()["defaults"], known()["refused"]
    kind = text.get("model_type")
    if kind is None and text is not config:  # the type stands outside
        outer = str(config.get("model_type"))
        plain = known()["outer"].get(outer, outer.removesuffix("_vl"))
        kind = next((each for each in (f"{outer}_text", plain) if each in defaults), outer)
    if isinstance(kind, str) and kind in defaults:
        return kind
    near = get_close_matches(str(kind), defaults, n=3)
    unknown = f"model_type must be one of the {len(defaults)} known types, got {kind!r}"
    unknown += f" (near: {', '.join(near)})" if near else ""
    raise ValueError(
        f"{where}: {refused.get(str(kind), unknown)}; describe any other model in a file like "
        f"those in conf/model"
    )


def layer_words(file: ConfigFile) -> list[str]:
    words = _own_words(file)
    if any("S" in word for word in words) and _sees_all(file):
        words = [word.replace("S", "F") for word in words]
    first_shared = len(words) - file.count("num_kv_shared_layers", default=0, least=0)
    if first_shared < 1:
        raise ValueError(
            f"{file.where}: num_kv_shared_layers must be less than the {len(words)} layers"
        )
    return [*words[:first_shared], *(word.lower() for word in words[first_shared:])]


def _sees_all(file: ConfigFile) -> bool:
    """True if windows are off, or so long that they hold the whole context."""
    name = "attention_chunk_size" if file.kind == "llama4_text" else "sliding_window"
    window, context = file.values.get(name), file.values.get("max_position_embeddings")
    is_long = isinstance(window, int) and isinstance(context, int) and window >= context
    # windows beside compressed KV, or with other heads than full attention
    if file.kind == "deepseek_v4" or any(map(file.has, OWN_HEADS)):
        if is_long:
            raise ValueError(
                f"{file.where}: {name} must be less than max_position_embeddings={context} in a "
                f"model whose windows have KV of their own shape, got {window}"
            )
        return False
    return is_long or not file.values.get("use_sliding_window", file.kind not in OFF_BY_DEFAULT)


def _own_words(file: ConfigFile) -> list[str]:
    listed = file.values.get("layers_block_type", [])
    num = file.count(
        "num_hidden_layers", default=len(listed) if isinstance(listed, list) and listed else None
    )
    if num > 1000:
        raise ValueError(f"{file.where}: num_hidden_layers must be at most 1000, got {num}")
    if file.kind == "deepseek_v4" and "layer_types" not in file.values:
        return _ratio_words(file, num)
    if file.kind == "kimi_linear" and "layer_types" not in file.values:
        full = file.group("linear_attn_config").values.get("full_attn_layers")
        if not isinstance(full, list):
            raise ValueError(f"{file.where}: full_attn_layers must be a list, got {full!r}")
        return ["F" if layer in full else "D" for layer in range(1, num + 1)]
    for name, letters in known()["layer_words"].items():
        if name not in file.values:
            continue
        listed = file.values[name]
        if file.kind in ("step3p5", "step3p7") and isinstance(listed, list):
            file.values[name] = listed[:num]  # the entries after these are layers for drafting
        return file.translated(name, num, letters)
    if file.kind == "llama4_text" and file.has("no_rope_layers"):  # 1: in chunks, with rope
        return ["S" if entry else "F" for entry in file.each_layer("no_rope_layers", num)]
    if file.kind == "nemotron_h":
        raise ValueError(f"{file.where}: hybrid_override_pattern or layers_block_type is missing")
    for name, letter in EVERY.items():
        if name in file.values:
            every = file.count(name)
            return [letter if layer % every else "F" for layer in range(1, num + 1)]
    if file.has("sliding_window") and not _sees_all(file):
        if file.kind not in ALL_IN_WINDOWS:
            raise ValueError(f"{file.where}: layer_types is missing, which says where windows are")
        first = file.count("max_window_layers", default=0, least=0)
        return ["S" if layer >= first else "F" for layer in range(num)]
    return ["F"] * num


def _ratio_words(file: ConfigFile, num: int) -> list[str]:
    ratios = file.values.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < num or not set(ratios) <= RATIO_WORDS.keys():
        raise ValueError(
            f"{file.where}: compress_ratios must be a list of {num} or more of "
            f"{', '.join(map(str, RATIO_WORDS))}, got {ratios!r:.80}"
        )
    return [RATIO_WORDS[ratio] for ratio in ratios[:num]]


def index_layers(file: ConfigFile, num_layers: int) -> list[bool]:
    """Return for each layer whether it keeps index keys, which choose tokens for sparse attention.

    If the file lists these layers, the list decides. Otherwise every n-th layer keeps them, with n
    from the file. Missing numbers get the defaults of transformers 5.23.
    """
    if not file.has("index_head_dim") or file.kind == "deepseek_v4":
        return [False] * num_layers
    if "sparse_attention_freq" in file.values:  # MiniMax-M3
        return [entry == 1 for entry in file.each_layer("sparse_attention_freq", num_layers)]
    if "minimax_m3_sparse" in file.values.get("layer_types", ()):  # type: ignore[operator]
        said = file.each_layer("layer_types", num_layers)
        return [entry == "minimax_m3_sparse" for entry in said]
    for name in ("indexer_types", "index_topk_pattern"):
        if name not in file.values:
            continue
        return file.translated(name, num_layers, INDEX_WORDS)
    every = file.count("index_topk_freq", default=1)
    skipped = file.count("index_skip_topk_offset", default=2, least=0)
    return [max(layer + 1 - skipped, 0) % every == 0 for layer in range(num_layers)]


def blocks_of(file: ConfigFile) -> list[object]:
    blocks = file.values.get("hybrid_override_pattern", file.values.get("layers_block_type"))
    return list(cast("list[object]", blocks))
