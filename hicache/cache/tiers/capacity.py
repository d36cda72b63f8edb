"""How many pages and slots a budget of memory gives each pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hicache.cache.pages import PageAllocator, Pools, TracedAllocator
from hicache.cache.tree.node import DEVICE, FULL, HOST, KIND_OF, MAMBA, SWA, TIER_NAMES
from hicache.config import CacheConfig
from hicache.models import GIB, PLAIN, ModelConfig, coded_page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Pages (mamba: slots) by component, of one tier; None: never full.

    0 where the model keeps nothing.
    """

    counts: tuple[int | None, int | None, int | None]
    total_bytes: int


def page_bytes(
    model: ModelConfig, page_size: int, tp: int, form: str = PLAIN
) -> tuple[int, int, int]:
    """Bytes of a page (full, swa) and of a slot (mamba), over all devices of an engine.

    `form`: the format of the numbers (`models.FORMATS`).
    """
    sizes = [0, 0, 0]
    for component in model.components:
        copies = model.kv_copies(component, tp)
        sizes[KIND_OF[component]] = coded_page_bytes(model, component, page_size, form) * copies
    return sizes[FULL], sizes[SWA], sizes[MAMBA]


def capacities(
    cache: CacheConfig,
    model: ModelConfig,
    sizes: Sequence[int],
    free_device_bytes: int,
    *,
    host_sizes: Sequence[int] | None = None,
) -> tuple[Capacity, Capacity]:
    """The pools of device and host, rounded down to whole pages.

    `host_sizes`: bytes of pages and slots on the host; None: as on the device.

    Raises:
        ValueError: a pool has no room for the least that a request needs.
    """
    if cache.page_size > model.max_len:
        raise ValueError(
            f"cache.page_size={cache.page_size} must not exceed model.max_len={model.max_len} of "
            f"{model.name}"
        )
    if cache.unlimited:
        full, swa, mamba = (None if size else 0 for size in sizes)
        endless = Capacity(counts=(full, swa, mamba), total_bytes=0)
        return endless, endless
    device_bytes = free_device_bytes if cache.device_gib is None else int(cache.device_gib * GIB)
    if device_bytes > free_device_bytes:
        raise ValueError(
            f"cache.device_gib={cache.device_gib} is more than the {free_device_bytes / GIB:.1f} "
            f"GiB of device memory that the weights of {model.name} and activations leave free; "
            f"cache.device_gib=null takes all of it"
        )
    device = _split(cache, model, sizes, DEVICE, device_bytes)
    host_bytes = 2 * device_bytes if cache.host_gib is None else int(cache.host_gib * GIB)
    return device, _split(cache, model, host_sizes or sizes, HOST, host_bytes)


def make_pools(device: Capacity, host: Capacity, *, is_traced: bool, is_checked: bool) -> Pools:
    """Allocators of these capacities.

    `is_traced`: they keep the digest by which ranks are compared; `is_checked`: they notice what is
    given back twice.
    """
    allocator = partial(TracedAllocator if is_traced else PageAllocator, is_checked=is_checked)
    return [*map(allocator, device.counts)], [*map(allocator, host.counts)]


def _split(
    cache: CacheConfig, model: ModelConfig, sizes: Sequence[int], tier: int, total: int
) -> Capacity:
    word = TIER_NAMES[tier]
    shares = [1.0, 0.0, 0.0]
    for kind, name in ((SWA, f"swa_{word}_share"), (MAMBA, f"mamba_{word}_share")):
        if sizes[kind]:
            chosen = getattr(cache, name)
            shares[kind] = getattr(model, name) if chosen is None else chosen
    shares[FULL] = 1.0 - shares[SWA] - shares[MAMBA]
    if shares[FULL] < 0:
        raise ValueError(
            f"cache.swa_{word}_share and cache.mamba_{word}_share must add up to at most 1, "
            f"got {shares[SWA]} and {shares[MAMBA]}"
        )
    counts = [
        int(total * share) // size if size else 0 for share, size in zip(shares, sizes, strict=True)
    ]
    exact = _exact(cache, tier)
    for kind in (FULL, SWA, MAMBA):
        wanted = exact[kind]
        if sizes[kind] and wanted is not None:
            counts[kind] = wanted if kind == MAMBA else wanted // cache.page_size
    if tier == DEVICE:
        window_pages = -(-model.window_len // cache.page_size) + 2
        least = (1, window_pages if sizes[SWA] else 0, 4 if sizes[MAMBA] else 0)
        what = ("page of full KV", f"window of {window_pages} pages", "request's 4 state slots")
        shared = (
            "",
            f" or cache.swa_device_share={shares[SWA]}",
            f" or cache.mamba_device_share={shares[MAMBA]}",
        )
        for kind in (FULL, SWA, MAMBA):
            if counts[kind] < least[kind]:
                raise ValueError(
                    f"the device pool is too small for one {what[kind]}: "
                    f"{total * shares[kind] / GIB:.3f} GiB hold {counts[kind]}, and {model.name} "
                    f"needs at least {least[kind]}; raise cache.device_gib{shared[kind]}"
                )
    if any(count is not None for count in exact):
        total = sum(count * size for count, size in zip(counts, sizes, strict=True))
    return Capacity(counts=(counts[0], counts[1], counts[2]), total_bytes=total)


def _exact(cache: CacheConfig, tier: int) -> tuple[int | None, int | None, int | None]:
    # tokens (mamba: states) that the config gives, by kind; None: what the memory gives
    if tier == DEVICE:
        return cache.device_tokens, cache.swa_device_tokens, cache.device_states
    return cache.host_tokens, cache.swa_host_tokens, cache.host_states
