"""Shapes of real models, and of the machines that run them.

The numbers live in `conf/model/*.yaml` and `conf/hardware/*.yaml`, each with its source. Bytes
are counted over all layers and all devices of one engine, every KV head once.
"""

from dataclasses import dataclass, field
from enum import Enum

GIB = 1 << 30


class ComponentKind(Enum):
    """A kind of state that a model keeps of the tokens it has read."""

    full = "full"
    swa = "swa"
    mamba = "mamba"


_KIND_OF = {
    "F": ComponentKind.full,
    "f": ComponentKind.full,
    "S": ComponentKind.swa,
    "s": ComponentKind.swa,
    "M": ComponentKind.mamba,
    "D": ComponentKind.mamba,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What one model keeps and computes, over all its layers and devices.

    `pattern` says what the layers are, from the first, one word a layer, repeated up to
    `num_layers`: `F` attends to all tokens, `S` to the window, `f` and `s` do so through the KV of
    an earlier layer, `M` scans with Mamba, `D` with a delta rule, `-` does none of this (an MLP or
    experts alone); a word of two letters runs both on the same input, as in `SM`. Without a
    pattern the layers stand in the order full, swa, mamba.

    Parameters are those of matrices a token is multiplied with: `dense_params` for every token,
    `expert_params` those of one expert of one layer, `head_params` for the last token of a
    sequence alone.
    """

    name: str = "???"
    source: str = "???"  # where the shapes were read
    max_len: int = 131072  # tokens of prompt and answer together
    window_len: int = 0  # sliding window in tokens; 0: no sliding-window layers
    pattern: str = ""
    num_layers: int = 0  # 0: as many as the counts below say
    num_full_layers: int = 0
    num_swa_layers: int = 0
    num_mamba_layers: int = 0
    default_tp: int = 1
    swa_device_share: float = 0.0
    swa_host_share: float = 0.0
    mamba_device_share: float = 0.0
    mamba_host_share: float = 0.0

    hidden_size: int = 0
    num_query_heads: int = 0
    head_dim: int = 0  # of a query and a key
    value_dim: int = 0  # of a value; 0: as head_dim
    num_kv_heads: int = 0
    latent_dim: int = 0  # MLA: elements a token and layer keep instead of keys and values
    swa_num_query_heads: int = 0  # of sliding-window layers; 0: as the full layers
    swa_num_kv_heads: int = 0
    swa_head_dim: int = 0
    kv_dtype_bytes: int = 2

    recurrent_heads: int = 0
    recurrent_head_dim: int = 0
    recurrent_state_dim: int = 0  # 0: a short convolution with no state behind it
    recurrent_groups: int = 0  # of B and C in `M` layers; 0: they bypass the convolution
    recurrent_key_heads: int = 0  # of `D` layers
    conv_taps: int = 4
    conv_dtype_bytes: int = 2
    state_dtype_bytes: int = 4

    dense_params: int = 0
    head_params: int = 0
    embedding_params: int = 0  # a table that is not the head's; a token costs nothing
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    expert_width: int = 0  # inner size of an expert
    expert_matrices: int = 3  # 3: gated, 2: not
    dense_param_bytes: float = 2.0
    expert_param_bytes: float = 2.0
    blocks_per_layer: int = 2  # all-reduces a layer: after its attention and after its MLP

    def __post_init__(self) -> None:
        if (self.window_len > 0) != (self.num_swa_layers > 0):
            raise ValueError(
                f"model {self.name}: window_len must be positive with sliding-window layers and 0 "
                f"without, got {self.window_len} and {self.num_swa_layers} layers"
            )
        unknown = set(self.pattern) - set(_KIND_OF) - {"-", " "}
        if unknown:
            raise ValueError(
                f"model {self.name}: pattern may hold F f S s M D - and spaces, "
                f"got {self.pattern!r}"
            )
        if self.pattern.strip():
            for kind, field_name in (
                (ComponentKind.full, "num_full_layers"),
                (ComponentKind.swa, "num_swa_layers"),
                (ComponentKind.mamba, "num_mamba_layers"),
            ):
                said = getattr(self, field_name)
                shown = sum(kind in kinds for kinds in self.layer_kinds)
                if said != shown:
                    raise ValueError(
                        f"model {self.name}: {field_name} is {said}, but pattern over "
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
        kinds = [ComponentKind.full]
        if self.num_swa_layers:
            kinds.append(ComponentKind.swa)
        if self.num_mamba_layers:
            kinds.append(ComponentKind.mamba)
        return tuple(kinds)

    @property
    def layer_words(self) -> tuple[str, ...]:
        """What every layer is, in the letters of `pattern`, from the first layer."""
        words = self.pattern.split()
        if not words:
            return (
                ("F",) * self.num_full_layers
                + ("S",) * self.num_swa_layers
                + ("M",) * self.num_mamba_layers
            )
        return tuple(words[layer % len(words)] for layer in range(self.num_layers))

    @property
    def layer_kinds(self) -> tuple[tuple[ComponentKind, ...], ...]:
        """The components that every layer reads, from the first layer; empty for `-`."""
        return tuple(
            tuple(_KIND_OF[letter] for letter in word if letter != "-") for word in self.layer_words
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
        return self.num_holders(ComponentKind.full) * self.full_layer_token_bytes

    @property
    def full_layer_token_bytes(self) -> int:
        """Bytes a token of full KV takes in one layer."""
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
        heads = self.num_kv_heads
        if kind is ComponentKind.swa and self.swa_num_kv_heads:
            heads = self.swa_num_kv_heads
        return max(1, tp // max(1, heads))


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTable:
    """A rate that depends on a size: linear between points, constant outside them.

    `status` is measured or modelled, and `source` says by whom or from what.
    """

    size: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)  # a second
    source: str = "???"
    status: str = "modelled"

    def __post_init__(self) -> None:
        if len(self.size) != len(self.rate):
            raise ValueError(
                f"a rate table needs one rate for each size, "
                f"got {len(self.rate)} rates for {len(self.size)} sizes"
            )
        if any(low >= high for low, high in zip(self.size, self.size[1:], strict=False)):
            raise ValueError(f"the sizes of a rate table must rise, got {list(self.size)}")
        if any(rate <= 0 for rate in self.rate):
            raise ValueError(f"the rates of a rate table must be positive, got {list(self.rate)}")
        if self.status not in ("measured", "modelled"):
            raise ValueError(
                f"status of a rate table must be measured or modelled, got {self.status!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number about a machine, with where it is from."""

    value: float = 0.0
    source: str = "???"
    status: str = "modelled"

    def __post_init__(self) -> None:
        if self.status not in ("measured", "modelled"):
            raise ValueError(
                f"status of a figure must be measured or modelled, got {self.status!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyKernelConfig:
    """How our copy kernel is launched across the link of a machine, and what a program of it moves.

    The real executor launches so many programs, and the simulation lets so many move what one of
    them moves, each with `tile_bytes` on their way in `warps` warps.
    """

    link_programs: int | None = None  # none: as many as the kernel takes by itself, without a cap
    tile_bytes: int = 65536  # what the kernel is compiled for, and the figures hold for
    warps: int = 16
    to_device: Figure = Figure(source="not known")  # bytes a second of one program
    to_host: Figure = Figure(source="not known")

    def __post_init__(self) -> None:
        if self.link_programs is None:
            return
        if self.link_programs < 1:
            raise ValueError(
                f"hardware.copy_kernel.link_programs must be at least 1, got {self.link_programs}"
            )
        for name, figure in (("to_device", self.to_device), ("to_host", self.to_host)):
            if figure.value <= 0:
                raise ValueError(
                    f"hardware.copy_kernel.{name} must be positive where link_programs is given, "
                    f"got {figure.value}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """What one machine can do. Rates are of one device: flops, bytes, tokens a second."""

    name: str = "???"
    num_devices: int = 8  # in one domain of fast links
    devices_per_host: int = 8
    device_memory_bytes: Figure = field(default_factory=Figure)
    activation_bytes: Figure = field(default_factory=Figure)  # of a device, kept from the cache
    step_s: Figure = field(default_factory=Figure)  # what a step costs with nothing to compute
    extend_s: Figure = field(default_factory=Figure)  # what each sequence that it extends adds
    tile_tokens: int = 1  # each sequence's tokens are multiplied in whole tiles of so many

    gemm_bf16: RateTable = field(default_factory=RateTable)  # by tokens
    gemm_fp8: RateTable = field(default_factory=RateTable)
    weight_bandwidth: Figure = field(default_factory=Figure)
    moe_narrow: RateTable = field(default_factory=RateTable)  # by tokens an expert gets
    moe_wide: RateTable = field(default_factory=RateTable)
    moe_two_matrix: RateTable = field(default_factory=RateTable)

    attention_d64: RateTable = field(default_factory=RateTable)  # by prompt length
    attention_d128: RateTable = field(default_factory=RateTable)
    attention_window: RateTable = field(default_factory=RateTable)  # by window length
    decode_bandwidth: RateTable = field(default_factory=RateTable)  # by bytes of KV read in a layer

    delta_rate: Figure = field(default_factory=Figure)  # state elements × tokens
    mamba_rate: Figure = field(default_factory=Figure)
    conv_rate: Figure = field(default_factory=Figure)  # channels × tokens
    state_bandwidth: Figure = field(default_factory=Figure)

    all_reduce_s: Figure = field(default_factory=Figure)  # before the first byte
    link_bandwidth: Figure = field(default_factory=Figure)  # between devices, one way

    pcie_bandwidth: Figure = field(default_factory=Figure)  # one way
    copy_engine: RateTable = field(default_factory=RateTable)  # by contiguous bytes
    kernel_to_device: RateTable = field(default_factory=RateTable)
    kernel_to_host: RateTable = field(default_factory=RateTable)
    copy_kernel: CopyKernelConfig = field(default_factory=CopyKernelConfig)
    host_bandwidth: Figure = field(default_factory=Figure)  # of one host
    network_bandwidth: Figure = field(default_factory=Figure)  # of a device's adapter
    copy_slowdown: Figure = field(default_factory=Figure)  # compute takes this times as long
