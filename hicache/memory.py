"""What a model caches, and how much of it fits: kinds of data, and sizes of page pools."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hicache.cache.kinds import FULL, KEY_TAGS, MAMBA, SWA, Extent, Kind, Kinds
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES
from hicache.config import CacheConfig, TierSizes
from hicache.models import (
    GIB,
    PLAIN,
    HardwareConfig,
    LayerKind,
    ModelConfig,
    coded_page_bytes,
)

# per device, before weights are loaded: CUDA context and libraries (an assumption, not measured)
CONTEXT_BYTES = GIB
# per device: the peak of activations that vLLM measures before it sizes its pool (an assumption for
# a dense model of 8 B parameters with 8,192 tokens per step)
ACTIVATION_PEAK_BYTES = GIB


def model_kinds(
    model: ModelConfig, page_size: int, tp: int, form: str = PLAIN, *, replays: bool = False
) -> Kinds:
    """Return the kinds of data that `model` caches, with the bytes of a page of each kind.

    `page_size` is in tokens. `tp` is the number of tensor-parallel devices. `form` is the number
    format of cached values, such as fp8; "plain" keeps the model's own format. `replays` is True if
    sliding windows are recomputed instead of cached (`cache.window=replay`).

    Raises:
        ValueError: `page_size` does not fit the data of the model.
    """
    full_bytes, swa_bytes, mamba_bytes = (
        coded_page_bytes(model, kind, page_size, form) * model.kv_copies(kind, tp)
        for kind in LayerKind
    )
    kinds = [Kind(name="full", number=FULL, page_bytes=full_bytes)]
    if swa_bytes:
        swa = Kind(
            name="swa",
            number=SWA,
            extent=Extent.chunk if model.window_restarts else Extent.window,
            window_len=model.window_len,
            is_replayed=replays,
            page_bytes=swa_bytes,
        )
        kinds.append(swa)
    if mamba_bytes:
        kinds.append(Kind(name="mamba", number=MAMBA, extent=Extent.point, page_bytes=mamba_bytes))
    kinds += [
        Kind(
            name=part.name,
            number=model.kind_names.index(part.name) if part.window_len else -1,
            extent=Extent.window if part.window_len else Extent.path,
            window_len=part.window_len,
            is_replayed=replays and part.window_len > 0,
            rider_of=None if part.window_len else part.rides_on,
            page_bytes=model.part_page_bytes(part, page_size, tp),
        )
        for part in model.parts
    ]
    refuse_unless_possible(kinds, page_size)
    return Kinds(kinds, page_size)


def refuse_unless_possible(kinds: Sequence[Kind], page_size: int) -> None:
    """Check that one cache can hold these kinds of data together.

    Raises:
        ValueError: it cannot.
    """
    own = {kind.number: kind for kind in kinds if kind.rider_of is None}
    of = {extent: [n for n in sorted(own) if own[n].extent is extent] for extent in Extent}
    names = {kind.name for kind in own.values()}
    riders = [kind for kind in kinds if kind.rider_of is not None]
    if len({kind.name for kind in kinds}) < len(kinds) or len(own) + len(riders) < len(kinds):
        raise ValueError(f"two kinds have one name or number: {kinds}")
    for kind in riders:
        if kind.rider_of not in names:
            raise ValueError(f"kind {kind.name} rides on {kind.rider_of}, which has no pool")
    if of[Extent.path] != [FULL]:
        raise ValueError(f"full must be the only path, got the numbers {of[Extent.path]}")
    if len(of[Extent.point]) > 1:
        raise ValueError(f"a second point must ride on the first, got {of[Extent.point]}")
    if min(own) < 0 or max(own) >= len(KEY_TAGS):
        raise ValueError(f"numbers must lie in [0, {len(KEY_TAGS)}), got {sorted(own)}")
    if not all(own[number].window_len > 0 for number in of[Extent.window] + of[Extent.chunk]):
        raise ValueError(f"a window must have tokens: {kinds}")
    if of[Extent.point] and any(kind.is_replayed for kind in kinds):
        raise ValueError("cache.window=replay needs a model without states, which it would repeat")
    for number in of[Extent.chunk]:
        if own[number].window_len % page_size:
            raise ValueError(
                f"cache.page_size must divide the chunks of {own[number].name}, "
                f"{own[number].window_len} tokens, got {page_size}"
            )


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
    rule. With `sglang_fraction`, SGLang's rule applies: the KV cache and the weights share a
    fraction of the memory that was free at the start. With `vllm_fraction`, vLLM's rule
    applies: the KV cache, the weights and the activations share a fraction of the whole memory.
    """
    memory = hardware.device_memory_bytes.value
    if cache.device.sglang_fraction is not None:
        each = cache.device.sglang_fraction * (memory - CONTEXT_BYTES)
    elif cache.device.vllm_fraction is not None:
        each = cache.device.vllm_fraction * memory - CONTEXT_BYTES - ACTIVATION_PEAK_BYTES
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
    if cache.host.sglang_ratio is not None:
        scaled = tuple([int(cache.host.sglang_ratio * (count or 0)) for count in device.counts])
        total = sum(count * host_kinds.page_bytes[kind] for kind, count in enumerate(scaled))
        return device, Capacity(counts=scaled, total_bytes=total)
    host_bytes = 2 * device_bytes if cache.host_gib is None else int(cache.host_gib * GIB)
    return device, _split(cache, model, host_kinds, HOST, host_bytes)


def _split(cache: CacheConfig, model: ModelConfig, kinds: Kinds, tier: int, total: int) -> Capacity:
    sizes: TierSizes = cache.device if tier == DEVICE else cache.host
    group, names = f"cache.{TIER_NAMES[tier]}", model.kind_names
    _refuse_unknown(f"{group}.tokens", sizes.tokens, set(names) - {LayerKind.mamba.value})
    _refuse_unknown(f"{group}.share", sizes.share, set(names) - {LayerKind.full.value})
    shares, given = _shares(sizes, model, kinds, tier), _given(sizes, kinds)
    counts = [0] * kinds.size
    for kind in kinds.numbers:
        counts[kind] = int(total * shares[kind]) // kinds.page_bytes[kind]
        if kind in given:
            counts[kind] = given[kind][1] // kinds.units[kind]
    for kind, (wanted, what) in _least(kinds).items() if tier == DEVICE else ():
        if counts[kind] < wanted:
            holds = f"{total * shares[kind] / GIB:.3f} GiB hold"
            knob, name = "cache.device_gib", kinds.names[kind]
            if kind != FULL and shares[kind]:
                knob += f" or {group}.share.{name}={shares[kind]}"
            elif kind != FULL:
                knob = f"{group}.share.{name}={shares[kind]}, or set {group}.tokens.{name}"
            if kind in given:
                knob, value = f"{group}.{given[kind][0]}", given[kind][1]
                holds = f"{knob}={value} gives"
            raise ValueError(
                f"the device pool is too small for one {what}: {holds} {counts[kind]}, and "
                f"{model.name} needs at least {wanted}; raise {knob}"
            )
    if given:
        total = sum(count * size for count, size in zip(counts, kinds.page_bytes, strict=True))
    return Capacity(counts=tuple(counts), total_bytes=total)


def _refuse_unknown(setting: str, named: Mapping[str, object], known: Collection[str]) -> None:
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ValueError(f"{setting} has no {unknown[0]}: expected {', '.join(sorted(known))}")


def _shares(sizes: TierSizes, model: ModelConfig, kinds: Kinds, tier: int) -> list[float]:
    # fractions of a tier's memory, by kind
    shares = [0.0] * kinds.size
    for kind in kinds.aux:
        name = kinds.names[kind]
        shares[kind] = sizes.share.get(name, model.shares(TIER_NAMES[tier])[name])
        if tier == HOST and kind in dict(kinds.replayed):
            shares[kind] = 0.0
    shares[FULL] = 1.0 - sum(shares)
    if shares[FULL] < 0:
        named = [f"cache.{TIER_NAMES[tier]}.share.{kinds.names[kind]}" for kind in kinds.aux]
        raise ValueError(
            f"{' and '.join(named)} must add up to at most 1, "
            f"got {' and '.join(str(shares[kind]) for kind in kinds.aux)}"
        )
    return shares


def _given(sizes: TierSizes, kinds: Kinds) -> dict[int, tuple[str, int]]:
    # exact sizes in tokens or states by kind, each with its setting
    given = {}
    for kind in kinds.numbers:
        name = kinds.names[kind]
        if kind in kinds.points and sizes.states is not None:
            given[kind] = "states", sizes.states
        elif name in sizes.tokens:
            given[kind] = f"tokens.{name}", sizes.tokens[name]
    return given


def _least(kinds: Kinds) -> dict[int, tuple[int, str]]:
    # the pages or states that a device needs at least, by kind
    least = {FULL: (1, "page of full KV")}
    for kind, window in (*kinds.windows, *kinds.replayed):
        least[kind] = (window.num_pages + 2, f"window of {window.num_pages + 2} pages")
    return least | dict.fromkeys(kinds.points, (4, "request's 4 state slots"))


def smallest(tiers: Sequence[Capacity], page_bytes: Sequence[int]) -> Capacity:
    """Return the sizes of the pools of all pipeline stages together: of each kind the smallest.

    `page_bytes` holds the bytes of a page or state on this tier over all stages, by kind.
    """
    counts: tuple[int | None, ...] = tuple(
        None if None in of_kind else min(each or 0 for each in of_kind)
        for of_kind in zip(*[each.counts for each in tiers], strict=True)
    )
    sizes = zip(counts, page_bytes, strict=True)
    return Capacity(counts=counts, total_bytes=sum((count or 0) * size for count, size in sizes))


def shared_capacity(tier: Capacity, page_bytes: Sequence[int]) -> Capacity:
    """Return the sizes of a tier's pools if each may take all bytes of the tier.

    `page_bytes` holds the bytes of a page or state on that tier, by kind.
    """
    counts = zip(tier.counts, page_bytes, strict=True)
    return replace(
        tier, counts=tuple([tier.total_bytes // size if count else count for count, size in counts])
    )
