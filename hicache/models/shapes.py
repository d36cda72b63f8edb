"""Shapes of models.

The numbers come from `conf/model/*.yaml`, each with its source, or from a `config.json`. Bytes are
summed over all layers and all devices of one engine, with every KV head counted once.
"""

from dataclasses import dataclass
from enum import Enum
from math import fsum

from hicache.models.machines import HardwareConfig

GIB = 1 << 30


class LayerKind(Enum):
    full = "full"
    swa = "swa"
    mamba = "mamba"


_KIND_OF = (
    dict.fromkeys("Ff", LayerKind.full)
    | dict.fromkeys("Ss", LayerKind.swa)
    | dict.fromkeys("MD", LayerKind.mamba)
)


# other letters of a pattern's word: t, attention to chosen tokens only; -, neither attention nor
# state
_OTHER_LETTERS = "t-"


MOST_LAYERS = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Additional data that some layers cache: index keys, compressed KV, or KV of a further window.

    The data consists of entries, each for `tokens` tokens. A part without a window has no pages:
    its entries lie in those of another kind of cached data (full-attention KV, sliding-window KV or
    Mamba states, where each slot holds one entry). A part with a window has pages of its own.

    Attributes:
        name: used in messages.
        rides_on: whose pages hold the entries: full, swa, mamba, or the name of a part with a
            window.
        window_len: length in tokens of the part's own window; 0 means that it has none.
        device_share, host_share: for a part with a window, its fraction of the tier's memory.
        letter: the letter in `ModelConfig.pattern` of the layers that keep the part.
        num_layers: number of layers outside the pattern that keep the part.
        dim: elements of an entry, per head.
        tokens: tokens per entry.
        element_bytes: bytes of an element.
        scale_bytes: additional bytes of an entry, per head.
        heads: number of heads, which tensor parallelism divides among devices. 0 means a single
            head, of which every device has a copy.
        query_heads: query heads of the attention that reads the part. 0 means that no attention
            time is counted.
        query_dim: elements that a query head multiplies for each entry.
        top: maximum number of entries that a query reads. 0 means all.
    """

    name: str = "???"
    rides_on: str = "full"
    window_len: int = 0
    device_share: float = 0.0
    host_share: float = 0.0
    letter: str = ""
    num_layers: int = 0
    dim: int = 0
    tokens: int = 1
    element_bytes: float = 2.0
    scale_bytes: int = 0
    heads: int = 0
    query_heads: int = 0
    query_dim: int = 0
    top: int = 0

    def __post_init__(self) -> None:
        if len(self.letter) > 1 or self.letter in {*_KIND_OF, *_OTHER_LETTERS, " "}:
            raise ValueError(
                f"part {self.name}: letter must be one that model.pattern does not use "
                f"yet, got {self.letter!r}"
            )
        if bool(self.letter) == (self.num_layers > 0):
            raise ValueError(
                f"part {self.name}: either letter or num_layers must say which layers "
                f"keep it, got {self.letter!r} and {self.num_layers}"
            )
        if min(self.dim, self.tokens) < 1 or self.entry_bytes % 1:
            raise ValueError(
                f"part {self.name}: an entry must have whole bytes, of one token or "
                f"more, got {self.entry_bytes} of {self.tokens}"
            )

    @property
    def entry_bytes(self) -> float:
        return max(self.heads, 1) * (self.dim * self.element_bytes + self.scale_bytes)

    def is_in(self, word: str) -> bool:
        return bool(self.letter) and self.letter in word

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes that this extra cached data adds to one page in one layer.

        A page has `page_size` tokens. If the data lies in the slots of Mamba states, return the
        bytes that it adds to a slot.

        Raises:
            ValueError: one entry of the data covers several tokens, and `page_size` is not a
                multiple of them.
        """
        if self.rides_on == LayerKind.mamba.value:
            return int(self.entry_bytes)
        if page_size % self.tokens:
            raise ValueError(
                f"cache.page_size must be a multiple of {self.tokens}, the tokens of "
                f"an entry of {self.name}, got {page_size}"
            )
        return page_size // self.tokens * int(self.entry_bytes)

    def copies(self, tp: int) -> int:
        """Return how many of the `tp` devices of an engine hold a copy of the same head.

        Data with a single head is not divided among devices, so all `tp` devices hold a copy.
        """
        return max(1, tp // self.heads) if self.heads else tp


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model: its layers, what it caches per token, and its parameters.

    Counts are over all devices of an engine, with every KV head counted once.
    """

    name: str = "???"  # Name of the model, shown in tables.
    source: str = (
        "???"  # Source of the fields below, for example the model's published config.json.
    )
    # Path of a Hugging Face config.json, from which all other fields are derived. None means that
    # the fields are given one by one.
    from_hf: str | None = None
    # Maximum tokens of prompt and answer together; longer requests are rejected.
    max_len: int = 131072
    # Sliding-window length in tokens. 0 means that the model has no sliding-window layers.
    window_len: int = 0
    # True if a window begins at the last multiple of `model.window_len` (chunked attention).
    window_restarts: bool = False
    # Type of each layer, one word per layer from the first on, repeated up to `model.num_layers`: F
    # full attention, S sliding window, f or s the same with the KV of an earlier layer, M Mamba, D
    # delta rule, - MLP only; two letters run side by side. Ft attends to
    # `model.top_tokens` tokens at most, and other letters stand for `model.parts`. Empty means all
    # F, then all S, then all M.
    pattern: str = ""
    # Number of layers that `model.pattern` describes; not needed without a pattern.
    num_layers: int = 0
    num_full_layers: int = 0  # Number of layers with full attention.
    num_swa_layers: int = 0  # Number of layers with sliding-window attention.
    num_mamba_layers: int = 0  # Number of recurrent layers (Mamba or delta rule).
    # Tensor-parallel size, in devices per engine, if `parallel.tp` is not set; a power of two.
    default_tp: int = 1
    # Fraction of the device tier's memory that is reserved for sliding-window KV, unless
    # `cache.device.share.swa` is set.
    swa_device_share: float = 0.0
    # Fraction of the host tier's memory that is reserved for sliding-window KV, unless
    # `cache.host.share.swa` is set.
    swa_host_share: float = 0.0
    # Fraction of the device tier's memory that is reserved for Mamba states, unless
    # `cache.device.share.mamba` is set.
    mamba_device_share: float = 0.0
    # Fraction of the host tier's memory that is reserved for Mamba states, unless
    # `cache.host.share.mamba` is set.
    mamba_host_share: float = 0.0

    hidden_size: int = 0  # Hidden size: the dimension of a token's vector between layers.
    num_query_heads: int = 0  # Number of query heads in each full-attention layer.
    head_dim: int = 0  # Dimension of each query and key head.
    value_dim: int = 0  # Dimension of each value head. 0 means `model.head_dim`.
    num_kv_heads: int = 0  # Number of KV heads in each full-attention layer.
    # Number of elements that MLA caches per token and layer in place of keys and values. 0 means
    # that the model does not use MLA.
    latent_dim: int = 0
    # What some layers cache besides, as a list of objects with the attributes of
    # `hicache.models.shapes.Part`.
    parts: tuple[Part, ...] = ()
    # Tokens that a query attends to at most in layers with sparse attention (t in `model.pattern`).
    top_tokens: int = 0
    # Number of query heads in each sliding-window layer. 0 means `model.num_query_heads`.
    swa_num_query_heads: int = 0
    # Number of KV heads in each sliding-window layer. 0 means `model.num_kv_heads`.
    swa_num_kv_heads: int = 0
    # Dimension of each query, key and value head in sliding-window layers. 0 means the same as in
    # full-attention layers.
    swa_head_dim: int = 0
    # Number of elements that sliding-window layers cache per token in place of keys and values. 0
    # means that they cache both.
    swa_latent_dim: int = 0
    kv_dtype_bytes: int = 2  # Bytes per element of cached KV: 2 for bf16, 1 for fp8.

    recurrent_heads: int = 0  # Number of heads in each recurrent layer.
    recurrent_head_dim: int = 0  # Dimension of each head in a recurrent layer.
    # State elements per channel of a recurrent layer: the state size of Mamba, or the key dimension
    # of a delta rule. 0 means that the layer is a short convolution and has no such state.
    recurrent_state_dim: int = 0
    # Number of groups of heads in a Mamba layer that share the projections B and C (n_groups of
    # Mamba-2). 0 means that B and C bypass the short convolution, as in Mamba-1.
    recurrent_groups: int = 0
    recurrent_key_heads: int = 0  # Number of query and key heads in each delta-rule layer.
    # Kernel width of the short convolution in a recurrent layer; the cached state keeps its last
    # conv_taps - 1 inputs.
    conv_taps: int = 4
    conv_dtype_bytes: int = 2  # Bytes per element of the cached convolution inputs.
    state_dtype_bytes: int = 4  # Bytes per element of a recurrent state: 4 for fp32.

    # Number of parameters that every token is multiplied with, over all layers; embedding, output
    # head and routed experts are not included.
    dense_params: int = 0
    head_params: int = 0  # Number of parameters of the output head, the matrix to the vocabulary.
    # Number of parameters of an input embedding that is separate from the output head; it takes
    # memory but no compute time. 0 means that the two are tied.
    embedding_params: int = 0
    num_moe_layers: int = 0  # Number of mixture-of-experts layers.
    num_experts: int = 0  # Number of routed experts in each mixture-of-experts layer.
    # Number of routed experts that each token activates in a mixture-of-experts layer.
    experts_per_token: int = 0
    expert_params: int = 0  # Number of parameters of one routed expert in one layer.
    expert_width: int = 0  # Intermediate size of the MLP of one routed expert.
    # Number of matrices per routed expert: 3 with a gated MLP, 2 without a gate.
    expert_matrices: int = 3
    # Bytes per parameter outside the routed experts: 2 for bf16, 1 for fp8. Embedding and output
    # head take at least 2.
    dense_param_bytes: float = 2.0
    # Bytes per parameter of the routed experts: 2 for bf16, 1 for fp8.
    expert_param_bytes: float = 2.0
    # Number of all-reduces per layer with tensor parallelism: by default one after attention and
    # one after the MLP.
    blocks_per_layer: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))  # a config hands over a list
        for name in ("num_layers", "num_full_layers", "num_swa_layers", "num_mamba_layers"):
            if not 0 <= getattr(self, name) <= MOST_LAYERS:
                raise ValueError(
                    f"model {self.name}: {name} must be between 0 and {MOST_LAYERS:,}, "
                    f"got {getattr(self, name):,}"
                )
        if (self.window_len > 0) != (self.num_swa_layers > 0):
            raise ValueError(
                f"model {self.name}: window_len must be positive if num_swa_layers is, otherwise "
                f"0, got window_len={self.window_len} and num_swa_layers={self.num_swa_layers}"
            )
        letters = {*_KIND_OF, *_OTHER_LETTERS, " ", *(part.letter for part in self.parts)}
        if set(self.pattern) - letters:
            raise ValueError(
                f"model {self.name}: pattern may contain F f S s M D - t, letters of parts and "
                f"spaces, got {self.pattern!r}"
            )
        for part in self.parts:
            if not part.window_len and part.rides_on not in self.kind_names:
                raise ValueError(
                    f"model {self.name}: part {part.name} must ride on one of "
                    f"{', '.join(self.kind_names)}, got {part.rides_on!r}"
                )
        if ("t" in self.pattern) != (self.top_tokens > 0):
            raise ValueError(
                f"model {self.name}: top_tokens must be positive if pattern has t, otherwise 0, "
                f"got {self.top_tokens} with {self.pattern!r}"
            )
        if self.pattern.strip():
            for kind in LayerKind:
                name = f"num_{kind.value}_layers"
                said = getattr(self, name)
                shown = sum(kind in kinds for kinds in self.layer_kinds)
                if said != shown:
                    raise ValueError(
                        f"model {self.name}: {name} is {said}, but pattern over "
                        f"{self.num_layers} layers has {shown}"
                    )
        for tier in ("device", "host"):
            shares = list(self.shares(tier).values())
            if min(shares) < 0 or sum(shares) >= 1:
                raise ValueError(
                    f"model {self.name}: the {tier} shares of {' and '.join(self.kind_names[1:])} "
                    f"must not be negative and must add up to less than 1, got "
                    f"{' and '.join(map(str, shares))}"
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
    def kinds(self) -> tuple[LayerKind, ...]:
        counts = (1, self.num_swa_layers, self.num_mamba_layers)
        return tuple(kind for kind, count in zip(LayerKind, counts, strict=True) if count)

    @property
    def layer_words(self) -> tuple[str, ...]:
        words = self.pattern.split()
        if not words:
            full_swa = "F" * self.num_full_layers + "S" * self.num_swa_layers
            return tuple(full_swa + "M" * self.num_mamba_layers)
        return tuple(words[layer % len(words)] for layer in range(self.num_layers))

    @property
    def layer_kinds(self) -> tuple[tuple[LayerKind, ...], ...]:
        return tuple(
            tuple(_KIND_OF[letter] for letter in word if letter in _KIND_OF)
            for word in self.layer_words
        )

    def num_holders(self, kind: LayerKind) -> int:
        letters = "".join(self.layer_words)
        if kind is LayerKind.full:
            return self.num_full_layers - letters.count("f")
        if kind is LayerKind.swa:
            return self.num_swa_layers - letters.count("s")
        return self.num_mamba_layers

    def shares(self, tier: str) -> dict[str, float]:
        named = {kind: getattr(self, f"{kind}_{tier}_share") for kind in self.kind_names[1:3]}
        windows = (part for part in self.parts if part.window_len)
        return named | {part.name: getattr(part, f"{tier}_share") for part in windows}

    @property
    def kind_names(self) -> tuple[str, ...]:
        # the index of a name is the number of its kind
        windows = (part.name for part in self.parts if part.window_len)
        return (*(kind.value for kind in LayerKind), *windows)

    def part_page_bytes(self, part: Part, page_size: int, tp: int) -> int:
        return self.part_layers(part) * part.page_bytes(page_size) * part.copies(tp)

    def part_layers(self, part: Part) -> int:
        return part.num_layers + sum(map(part.is_in, self.layer_words))

    def _own_layer_bytes(self, kind: str, word: str, tp: int) -> int:
        for paged, letter in ((LayerKind.full, "F"), (LayerKind.swa, "S")):
            if kind == paged.value:
                copies = self.kv_copies(paged, tp) * word.count(letter)
                return copies * self.layer_token_bytes(paged)
        return self.layer_state_bytes(word) if kind == LayerKind.mamba.value else 0

    def layer_bytes(self, kind: str, tp: int) -> list[float]:
        """Return [L] the bytes that each layer caches per token, summed over `tp` devices.

        `kind` is the name of the cached data: full, swa (sliding window), mamba, or a name in
        `parts`. For mamba, the bytes are those of a state. Index keys and other data of `parts`
        count for the kind in whose pages they lie. Data of layers outside the layer pattern counts
        for the last layer.
        """
        found = [float(self._own_layer_bytes(kind, word, tp)) for word in self.layer_words]
        for part in self.parts:
            if kind == (part.name if part.window_len else part.rides_on):
                each = part.entry_bytes * part.copies(tp) / part.tokens
                for layer, word in enumerate(self.layer_words):
                    found[layer] += each * part.is_in(word)
                found[-1] += each * part.num_layers
        return found

    @property
    def full_token_bytes(self) -> int:
        riders = (part for part in self.parts if part.rides_on == "full" and not part.window_len)
        more = fsum(self.part_layers(each) * each.entry_bytes / each.tokens for each in riders)
        return self.num_holders(LayerKind.full) * self.full_layer_token_bytes + round(more)

    @property
    def kv_share(self) -> float:
        """Fraction of the bytes of full-attention pages that is KV; the rest is index keys."""
        alone = self.num_holders(LayerKind.full) * self.full_layer_token_bytes
        return alone / max(self.full_token_bytes, 1)

    def row_dims(self, kind: LayerKind) -> list[int]:
        """Return the numbers of elements of the vectors that a layer caches for each token."""
        value_dim = self.value_dim or self.head_dim
        if kind is LayerKind.full:
            latent_dim, heads, dims = self.latent_dim, self.num_kv_heads, [self.head_dim, value_dim]
        else:
            latent_dim, heads = self.swa_latent_dim, self.swa_num_kv_heads or self.num_kv_heads
            dims = [self.swa_head_dim or self.head_dim, self.swa_head_dim or value_dim]
        return [latent_dim] if latent_dim else dims * heads

    def layer_token_bytes(self, kind: LayerKind) -> int:
        return sum(self.row_dims(kind)) * self.kv_dtype_bytes

    @property
    def full_layer_token_bytes(self) -> int:
        return self.layer_token_bytes(LayerKind.full)

    @property
    def swa_token_bytes(self) -> int:
        return self.num_holders(LayerKind.swa) * self.swa_layer_token_bytes

    @property
    def swa_layer_token_bytes(self) -> int:
        return self.layer_token_bytes(LayerKind.swa)

    @property
    def mamba_slot_bytes(self) -> int:
        return sum(self.layer_state_bytes(word) for word in self.layer_words)

    def layer_state_bytes(self, word: str) -> int:
        """Return the bytes of the recurrent state and the convolution inputs of one layer.

        `word` describes the layer: M stands for Mamba and D for the delta rule. Other layers have 0
        bytes. The convolution keeps its last `conv_taps - 1` inputs.
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

    def page_bytes(self, kind: LayerKind, page_size: int) -> int:
        """Return the bytes of one page of `page_size` tokens, over all layers of the kind.

        For Mamba layers, return the bytes of one state.
        """
        if kind is LayerKind.mamba:
            return self.mamba_slot_bytes
        return page_size * self.num_holders(kind) * self.layer_token_bytes(kind)

    @property
    def weight_bytes(self) -> int:
        experts = self.num_moe_layers * self.num_experts * self.expert_params
        return round(
            # embedding and output head are not quantized
            (self.head_params + self.embedding_params) * max(2.0, self.dense_param_bytes)
            + self.dense_params * self.dense_param_bytes
            + experts * self.expert_param_bytes
        )

    @property
    def num_params(self) -> int:
        experts = self.num_moe_layers * self.num_experts * self.expert_params
        return self.dense_params + self.head_params + self.embedding_params + experts

    def kv_copies(self, kind: LayerKind, tp: int) -> int:
        """Return how many of the `tp` devices hold a copy of the same KV.

        With MLA, every device has a copy. Otherwise there are several copies if the model has fewer
        KV heads than devices.
        """
        if kind is LayerKind.mamba:
            return 1
        if self.latent_dim if kind is LayerKind.full else self.swa_latent_dim:
            return tp
        heads = (kind is LayerKind.swa and self.swa_num_kv_heads) or self.num_kv_heads
        return max(1, tp // max(1, heads))


def describe(model: ModelConfig) -> str:
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
    """Return the smallest tensor-parallel size that leaves a quarter of memory for the KV cache.

    Only powers of two are considered. Memory for activations is subtracted first. If no power of
    two up to the number of devices suffices, return the largest one.
    """
    free_bytes = hardware.device_memory_bytes.value - hardware.activation_bytes.value
    devices = 1
    while 2 * devices <= hardware.num_devices and model.weight_bytes > 0.75 * devices * free_bytes:
        devices *= 2
    return devices


def tier_shares(model: ModelConfig) -> dict[str, float]:
    """Return the fraction of memory to reserve for sliding windows and for Mamba states.

    The keys are field names of `ModelConfig`, such as `swa_host_share`. The host's memory is
    divided in the proportions that a cached request needs in Mooncake's conversation trace. The
    device's memory is divided halfway between these proportions and those of a running request.
    """

    bytes_each = (model.full_token_bytes, model.swa_token_bytes, model.mamba_slot_bytes)
    window = model.window_len / (2 if model.window_restarts else 1)

    def shares(*counts: float) -> list[float]:
        parts = [count * size for count, size in zip(counts, bytes_each, strict=True)]
        return [part / fsum(parts) for part in parts[1:]]

    # new tokens, a window (half full if it restarts) and states of a cached request of that trace
    host = shares(7900, window, 0.85)
    # tokens, a window and half a chunk, and states of a running request
    running = shares(12200, window + 4096, 2)
    device = [sum(both) / 2 for both in zip(host, running, strict=True)]
    return {
        # a small share must not become nothing
        f"{kind}_{tier}_share": round(value, 2) or float(f"{value:.1g}")
        for tier, values in (("host", host), ("device", device))
        for kind, value in zip(("swa", "mamba"), values, strict=True)
    }
