"""Shapes of real models.

The numbers live in `conf/model/*.yaml`, each with its source, or come out of a `config.json`. Bytes
are counted over all layers and all devices of one engine, every KV head once.
"""

from dataclasses import dataclass
from enum import Enum

from hicache.models.machines import HardwareConfig

GIB = 1 << 30


class ComponentKind(Enum):
    """A kind of state that a model keeps of the tokens it has read."""

    full = "full"
    swa = "swa"
    mamba = "mamba"


_KIND_OF = (
    dict.fromkeys("Ff", ComponentKind.full)
    | dict.fromkeys("Ss", ComponentKind.swa)
    | dict.fromkeys("MD", ComponentKind.mamba)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What one model keeps and computes, over all its layers and devices.

    `pattern` says what the layers are, from the first, one word a layer, repeated up to
    `num_layers`: `F` attends to all tokens, `S` to the window, `f` and `s` do so through the KV of
    an earlier layer, `M` scans with Mamba, `D` with a delta rule, `-` does none of this (an MLP or
    experts alone); a word of two letters runs both on the same input, as in `SM`; `Fi` keeps
    index keys for sparse attention beside its KV. Without a pattern the layers stand in the order
    full, swa, mamba.

    Parameters are those of matrices a token is multiplied with: `dense_params` for every token,
    `expert_params` those of one expert of one layer, `head_params` for the last token of a
    sequence alone.
    """

    name: str = "???"  # of the model, in tables
    source: str = "???"  # where the shapes were read
    from_hf: str | None = None  # a config.json as published, from which all the rest is derived
    max_len: int = 131072  # tokens of prompt and answer together
    window_len: int = 0  # sliding window in tokens; 0: no sliding-window layers
    pattern: str = ""  # what the layers are, one word a layer, repeated: F S f s M D - Fi
    num_layers: int = 0  # 0: as many as the counts below say
    num_full_layers: int = 0  # layers that attend to all tokens
    num_swa_layers: int = 0  # layers that attend to the window
    num_mamba_layers: int = 0  # recurrent layers, of either sort
    default_tp: int = 1  # devices of an engine, unless parallel.tp says
    swa_device_share: float = 0.0  # of the device tier, for windows
    swa_host_share: float = 0.0  # of the host tier, for windows
    mamba_device_share: float = 0.0  # of the device tier, for states
    mamba_host_share: float = 0.0  # of the host tier, for states

    hidden_size: int = 0  # elements of a token between layers
    num_query_heads: int = 0  # of full layers
    head_dim: int = 0  # of a query and a key
    value_dim: int = 0  # of a value; 0: as head_dim
    num_kv_heads: int = 0  # of full layers
    latent_dim: int = 0  # MLA: elements a token and layer keep instead of keys and values
    index_dim: int = 0  # elements of the index key that a token keeps in each `Fi` layer
    swa_num_query_heads: int = 0  # of sliding-window layers; 0: as the full layers
    swa_num_kv_heads: int = 0  # of sliding-window layers; 0: as the full layers
    swa_head_dim: int = 0  # of queries, keys and values there; 0: as the full layers
    kv_dtype_bytes: int = 2  # of an element of KV

    recurrent_heads: int = 0  # of recurrent layers
    recurrent_head_dim: int = 0  # elements of a head of these
    recurrent_state_dim: int = 0  # 0: a short convolution with no state behind it
    recurrent_groups: int = 0  # of B and C in `M` layers; 0: they bypass the convolution
    recurrent_key_heads: int = 0  # of `D` layers
    conv_taps: int = 4  # of their short convolution, which keeps one less
    conv_dtype_bytes: int = 2  # of an element it keeps
    state_dtype_bytes: int = 4  # of an element of a state

    dense_params: int = 0  # of matrices that every token is multiplied with
    head_params: int = 0  # of the matrix to the vocabulary
    embedding_params: int = 0  # a table that is not the head's; a token costs nothing
    num_moe_layers: int = 0  # layers with experts
    num_experts: int = 0  # of such a layer
    experts_per_token: int = 0  # of them that a token goes to
    expert_params: int = 0  # of one expert of one layer
    expert_width: int = 0  # inner size of an expert
    expert_matrices: int = 3  # 3: gated, 2: not
    dense_param_bytes: float = 2.0  # of a dense parameter
    expert_param_bytes: float = 2.0  # of an expert's parameter
    blocks_per_layer: int = 2  # all-reduces a layer: after its attention and after its MLP

    def __post_init__(self) -> None:
        if (self.window_len > 0) != (self.num_swa_layers > 0):
            raise ValueError(
                f"model {self.name}: window_len must be positive with sliding-window layers and 0 "
                f"without, got {self.window_len} and {self.num_swa_layers} layers"
            )
        unknown = set(self.pattern) - set(_KIND_OF) - set("-i ")
        if unknown:
            raise ValueError(
                f"model {self.name}: pattern may hold F f S s M D - i and spaces, "
                f"got {self.pattern!r}"
            )
        if self.pattern.strip():
            for kind in ComponentKind:
                name = f"num_{kind.value}_layers"
                said = getattr(self, name)
                shown = sum(kind in kinds for kinds in self.layer_kinds)
                if said != shown:
                    raise ValueError(
                        f"model {self.name}: {name} is {said}, but pattern over "
                        f"{self.num_layers} layers has {shown}"
                    )
        for tier in ("device", "host"):
            shares = [getattr(self, f"{kind}_{tier}_share") for kind in ("swa", "mamba")]
            if min(shares) < 0 or sum(shares) >= 1:
                raise ValueError(
                    f"model {self.name}: the {tier} shares of swa and mamba must be 0 or more and "
                    f"leave something to full, got {shares[0]} and {shares[1]}"
                )
        if self.default_tp < 1 or self.default_tp & (self.default_tp - 1):
            raise ValueError(
                f"model {self.name}: default_tp must be a power of two, got {self.default_tp}"
            )
        if self.num_moe_layers and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model {self.name}: experts_per_token must lie between 1 and num_experts "
                f"({self.num_experts}), got {self.experts_per_token}"
            )

    @property
    def components(self) -> tuple[ComponentKind, ...]:
        """The kinds of state this model keeps; full always among them."""
        counts = (1, self.num_swa_layers, self.num_mamba_layers)
        return tuple(kind for kind, count in zip(ComponentKind, counts, strict=True) if count)

    @property
    def layer_words(self) -> tuple[str, ...]:
        """What every layer is, in the letters of `pattern`, from the first layer."""
        words = self.pattern.split()
        if not words:
            full_swa = "F" * self.num_full_layers + "S" * self.num_swa_layers
            return tuple(full_swa + "M" * self.num_mamba_layers)
        return tuple(words[layer % len(words)] for layer in range(self.num_layers))

    @property
    def layer_kinds(self) -> tuple[tuple[ComponentKind, ...], ...]:
        """The components that every layer reads, from the first layer; empty for `-`."""
        return tuple(
            tuple(_KIND_OF[letter] for letter in word if letter in _KIND_OF)
            for word in self.layer_words
        )

    def num_holders(self, kind: ComponentKind) -> int:
        """Layers that keep data of their own of this component."""
        letters = "".join(self.layer_words)
        if kind is ComponentKind.full:
            return self.num_full_layers - letters.count("f")
        if kind is ComponentKind.swa:
            return self.num_swa_layers - letters.count("s")
        return self.num_mamba_layers

    @property
    def full_token_bytes(self) -> int:
        """Bytes a token of full KV takes, over all layers that keep their own."""
        return sum(self.layer_full_bytes(word) for word in self.layer_words)

    def layer_full_bytes(self, word: str) -> int:
        """Bytes a token of full KV takes in a layer that `word` describes, index key included."""
        index_bytes = word.count("i") * self.index_dim * self.kv_dtype_bytes
        return word.count("F") * self.full_layer_token_bytes + index_bytes

    @property
    def full_layer_token_bytes(self) -> int:
        """Bytes a token of full KV takes in one layer, without its index key."""
        width = self.latent_dim or self.num_kv_heads * (
            self.head_dim + (self.value_dim or self.head_dim)
        )
        return width * self.kv_dtype_bytes

    @property
    def swa_token_bytes(self) -> int:
        """Bytes a token of sliding-window KV takes, over all layers that keep their own."""
        return self.num_holders(ComponentKind.swa) * self.swa_layer_token_bytes

    @property
    def swa_layer_token_bytes(self) -> int:
        """Bytes a token of sliding-window KV takes in one layer."""
        heads = self.swa_num_kv_heads or self.num_kv_heads
        width = 2 * self.swa_head_dim or self.head_dim + (self.value_dim or self.head_dim)
        return heads * width * self.kv_dtype_bytes

    @property
    def mamba_slot_bytes(self) -> int:
        """Bytes of one state slot: convolution taps and state of all recurrent layers."""
        return sum(self.layer_state_bytes(word) for word in self.layer_words)

    def layer_state_bytes(self, word: str) -> int:
        """Bytes of the convolution taps and of the state of a layer that `word` describes.

        The convolution runs over the heads' inputs and over B and C (`M`) or queries and keys
        (`D`), and keeps `conv_taps - 1` of each.
        """
        if "M" in word:
            groups = self.recurrent_groups
        elif "D" in word:
            groups = self.recurrent_key_heads
        else:
            return 0
        inner = self.recurrent_heads * self.recurrent_head_dim
        channels = inner + 2 * groups * self.recurrent_state_dim
        taps = channels * (self.conv_taps - 1) * self.conv_dtype_bytes
        return taps + inner * self.recurrent_state_dim * self.state_dtype_bytes

    def page_bytes(self, kind: ComponentKind, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens of a component; of one slot for mamba."""
        if kind is ComponentKind.full:
            return page_size * self.full_token_bytes
        if kind is ComponentKind.swa:
            return page_size * self.swa_token_bytes
        return self.mamba_slot_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, over all devices."""
        experts = self.num_moe_layers * self.num_experts * self.expert_params
        return round(
            # tables of the vocabulary are not quantised
            (self.head_params + self.embedding_params) * max(2.0, self.dense_param_bytes)
            + self.dense_params * self.dense_param_bytes
            + experts * self.expert_param_bytes
        )

    @property
    def num_params(self) -> int:
        """Parameters of all matrices, each counted once."""
        experts = self.num_moe_layers * self.num_experts * self.expert_params
        return self.dense_params + self.head_params + self.embedding_params + experts

    def kv_copies(self, kind: ComponentKind, tp: int) -> int:
        """Devices of a `tp` engine that hold the same KV: more devices than heads, or MLA."""
        if kind is ComponentKind.mamba:
            return 1
        if kind is ComponentKind.full and self.latent_dim:
            return tp
        heads = (kind is ComponentKind.swa and self.swa_num_kv_heads) or self.num_kv_heads
        return max(1, tp // max(1, heads))


def describe(model: ModelConfig) -> str:
    """What a model keeps and weighs, on one line for people."""
    counts = (
        (model.num_full_layers, "full"),
        (model.num_swa_layers, f"sliding-window ({model.window_len:,} tokens)"),
        (model.num_mamba_layers, "recurrent"),
    )
    layers = ", ".join(f"{count} {word}" for count, word in counts if count)
    kept = [f"{model.full_token_bytes:,} bytes a token"]
    if model.num_swa_layers:
        kept.append(f"{model.swa_token_bytes * model.window_len / (1 << 20):.1f} MiB a window")
    if model.num_mamba_layers:
        kept.append(f"{model.mamba_slot_bytes / (1 << 20):.1f} MiB a state")
    return (
        f"{model.name}: layers {layers}; {', '.join(kept)}; {model.num_params / 1e9:.2f} B "
        f"parameters in {model.weight_bytes / 1e9:.1f} GB"
    )


def least_tp(model: ModelConfig, hardware: HardwareConfig) -> int:
    """Return the smallest power of two of devices that keep a quarter of memory for the cache.

    Activations are no part of that memory. If the machine has too few devices, all of them.
    """
    free_bytes = hardware.device_memory_bytes.value - hardware.activation_bytes.value
    devices = 1
    while 2 * devices <= hardware.num_devices and model.weight_bytes > 0.75 * devices * free_bytes:
        devices *= 2
    return devices


def tier_shares(model: ModelConfig) -> dict[str, float]:
    """The share of each tier that windows and states get, by the names of the fields.

    The host is shared as a cached request of Mooncake's conversation trace asks: 7,900 new tokens,
    a window, 0.85 states. The device lies halfway from there to what a running one asks: 12,200
    tokens, a window and half a chunk, 2 states.
    """

    bytes_each = (model.full_token_bytes, model.swa_token_bytes, model.mamba_slot_bytes)

    def shares(*counts: float) -> list[float]:
        parts = [count * size for count, size in zip(counts, bytes_each, strict=True)]
        return [part / sum(parts) for part in parts[1:]]

    host = shares(7900, model.window_len, 0.85)
    running = shares(12200, model.window_len + 4096, 2)
    device = [sum(both) / 2 for both in zip(host, running, strict=True)]
    return {
        f"{kind}_{tier}_share": round(value, 2)
        for tier, values in (("host", host), ("device", device))
        for kind, value in zip(("swa", "mamba"), values, strict=True)
    }
