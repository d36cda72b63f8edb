"""Computes how many pages and state slots each pool gets from a memory budget."""

from dataclasses import dataclass

from hicache.cache.kinds import FULL, Kinds
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES
from hicache.config import CacheConfig
from hicache.models import GIB, HardwareConfig, ModelConfig

# per device, before weights are loaded: CUDA context and libraries (an assumption, not measured)
CONTEXT_BYTES = GIB
# per device: the peak of activations that vLLM measures before it sizes its pool (an assumption for
# a dense model of 8 B parameters with 8,192 tokens per step)
ACTIVATION_PEAK_BYTES = GIB

# by kind name: the knobs that set its tokens (or states) on each tier
EXACT = {
    "full": ("device_tokens", "host_tokens"),
    "swa": ("swa_device_tokens", "swa_host_tokens"),
    "mamba": ("device_states", "host_states"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The sizes of the page pools of one tier, such as device or host.

    `counts` holds one size per kind of data, in pages or Mamba state slots. None means unlimited; 0
    means that the model has no data of that kind. `total_bytes` is the memory of all pools.
    """

    counts: tuple[int | None, ...]
    total_bytes: int

    @property
    def full_pages(self) -> int | None:
        return self.counts[FULL]


def engine_rule(
    cache: CacheConfig, model: ModelConfig, hardware: HardwareConfig, tp: int
) -> int | None:
    """Return the bytes that a serving engine would reserve for its KV cache on the device.

    The result is the sum over `tp` tensor-parallel devices. Return None if the settings name no
    rule. With `mem_fraction_static`, SGLang's rule applies: the KV cache and the weights share a
    fraction of the memory that was free at the start. With `gpu_memory_utilization`, vLLM's rule
    applies: the KV cache, the weights and the activations share a fraction of the whole memory.
    """
    memory = hardware.device_memory_bytes.value
    if cache.mem_fraction_static is not None:
        each = cache.mem_fraction_static * (memory - CONTEXT_BYTES)
    elif cache.gpu_memory_utilization is not None:
        each = cache.gpu_memory_utilization * memory - CONTEXT_BYTES - ACTIVATION_PEAK_BYTES
    else:
        return None
    return max(0, round(tp * each) - model.weight_bytes)


def capacities(
    cache: CacheConfig,
    model: ModelConfig,
    kinds: Kinds,
    free_device_bytes: int,
    *,
    host_kinds: Kinds | None = None,
) -> tuple[Capacity, Capacity]:
    """Return the sizes of the page pools of the device and of the host, in whole pages.

    `free_device_bytes` is the device memory that weights and activations leave free. `host_kinds`
    holds the bytes of a page on the host; None means that pages on the host are as large as on the
    device.

    Raises:
        ValueError: the settings contradict each other, or a pool is too small for one request.
    """
    if cache.page_size > model.max_len:
        raise ValueError(
            f"cache.page_size={cache.page_size} must not exceed model.max_len={model.max_len} of "
            f"{model.name}"
        )
    if cache.unlimited:
        counts = tuple(None if kind in kinds.numbers else 0 for kind in range(kinds.size))
        endless = Capacity(counts=counts, total_bytes=0)
        return endless, endless
    device_bytes = free_device_bytes if cache.device_gib is None else int(cache.device_gib * GIB)
    if device_bytes > free_device_bytes:
        raise ValueError(
            f"cache.device_gib={cache.device_gib} is more than the {free_device_bytes / GIB:.1f} "
            f"GiB of device memory that the weights of {model.name} and activations leave free; "
            f"cache.device_gib=null takes all of it"
        )
    device = _split(cache, model, kinds, DEVICE, device_bytes)
    host_kinds = host_kinds or kinds
    if cache.host_ratio is not None:
        scaled = tuple([int(cache.host_ratio * (count or 0)) for count in device.counts])
        total = sum(count * host_kinds.page_bytes[kind] for kind, count in enumerate(scaled))
        return device, Capacity(counts=scaled, total_bytes=total)
    host_bytes = 2 * device_bytes if cache.host_gib is None else int(cache.host_gib * GIB)
    return device, _split(cache, model, host_kinds, HOST, host_bytes)


def _split(cache: CacheConfig, model: ModelConfig, kinds: Kinds, tier: int, total: int) -> Capacity:
    shares, counts = [0.0] * kinds.size, [0] * kinds.size
    shares[FULL], knobs = 1.0, {}
    for kind in kinds.aux:
        name, knob = kinds.names[kind], f"{TIER_NAMES[tier]}_share"
        chosen = getattr(cache, f"{name}_{knob}", None)  # None for windows of model parts
        if tier == HOST and kind in dict(kinds.replayed):
            chosen = 0.0
        shares[kind] = model.shares(TIER_NAMES[tier])[name] if chosen is None else chosen
        shares[FULL] -= shares[kind]
        knobs[kind] = f"cache.{name}_{knob}" if name in EXACT else f"{knob} of {name}, a model part"
    if shares[FULL] < 0:
        raise ValueError(
            f"{' and '.join(knobs.values())} must add up to at most 1, "
            f"got {' and '.join(str(shares[kind]) for kind in knobs)}"
        )
    has_exact = False
    for kind in kinds.numbers:
        exacts = EXACT.get(kinds.names[kind])
        exact = exacts and getattr(cache, exacts[tier])
        has_exact |= exact is not None
        counts[kind] = int(total * shares[kind]) // kinds.page_bytes[kind]
        if exact is not None:
            counts[kind] = exact // kinds.units[kind]
    if tier == DEVICE:
        least = {FULL: (1, "page of full KV")}
        for kind, window in (*kinds.windows, *kinds.replayed):
            least[kind] = (window.num_pages + 2, f"window of {window.num_pages + 2} pages")
        least |= dict.fromkeys(kinds.points, (4, "request's 4 state slots"))
        for kind, (wanted, what) in least.items():
            if counts[kind] < wanted:
                knob = f" or {knobs[kind]}={shares[kind]}" if kind in knobs else ""
                raise ValueError(
                    f"the device pool is too small for one {what}: "
                    f"{total * shares[kind] / GIB:.3f} GiB hold {counts[kind]}, and {model.name} "
                    f"needs at least {wanted}; raise cache.device_gib{knob}"
                )
    if has_exact:
        total = sum(count * size for count, size in zip(counts, kinds.page_bytes, strict=True))
    return Capacity(counts=tuple(counts), total_bytes=total)
