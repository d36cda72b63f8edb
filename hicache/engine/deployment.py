"""A deployment: an engine's devices, the cost of a step, and the sizes of its pools."""

from dataclasses import dataclass, replace

from hicache.cache.kinds import Kinds
from hicache.config import ExperimentConfig, WindowHit
from hicache.memory import Capacity, capacities, engine_rule, model_kinds, shared_capacity
from hicache.models import PLAIN
from hicache.models.cost import CostModel
from hicache.models.draft import draft_of, with_draft_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model on the devices of one serving engine, with step costs and memory sizes.

    The kinds of cached data are full-attention KV, sliding-window KV and Mamba states.

    Attributes:
        tp: tensor-parallel size, in devices.
        cost: predicts the duration of a step.
        draft_cost: that of a step of the draft; None means no speculation.
        kinds: the kinds of data that the model caches, with their bytes per page or state on the
            device.
        host_kinds: the same kinds, with their bytes in the host tier's number format.
        storage_kinds: the same kinds, with their bytes in the storage tier's number format.
        device: sizes of the memory pools on the device.
        host: sizes of the memory pools on the host.
    """

    tp: int
    cost: CostModel
    draft_cost: CostModel | None
    kinds: Kinds
    host_kinds: Kinds
    storage_kinds: Kinds
    device: Capacity
    host: Capacity


def deploy(config: ExperimentConfig) -> Deployment:
    """Return the deployment that `config` describes: step costs, page sizes and memory pools.

    Raises:
        ValueError: a memory pool is too small for one request.
    """
    plain = model = config.model
    if config.speculation.drafts:
        model = with_draft_kv(model, config.speculation.layers)
    # what pages hold below the device
    lower = plain if config.speculation.draft_kv == "none" else model
    cost = CostModel(
        model,
        config.hardware,
        tp=config.tp,
        ep=config.parallel.ep,
        pads_chunks=config.compat.rules.pads_chunks,
    )
    replays = config.cache.window is WindowHit.replay
    kinds, host_kinds, storage_kinds = (
        model_kinds(each, config.cache.page_size, config.tp, form, replays=replays)
        for each, form in (
            (model, PLAIN),
            (lower, config.cache.host_format),
            (lower, config.storage_format),
        )
    )
    cache, free_bytes = config.cache, cost.free_device_bytes
    ruled_bytes = engine_rule(cache, model, config.hardware, config.tp)
    if ruled_bytes is not None:
        cache, free_bytes = replace(cache, device_gib=None), ruled_bytes
    draft_cost = None
    if config.speculation.drafts:
        draft = draft_of(plain, config.speculation.layers)
        free_bytes -= draft.weight_bytes - round(
            draft.head_params * max(2.0, draft.dense_param_bytes)
        )
        draft_cost = CostModel(draft, config.hardware, tp=config.tp, ep=config.parallel.ep)
    if cache.host.sglang_gib is not None:
        cache = replace(cache, host_gib=cache.host.sglang_gib * config.tp)
    device, host = capacities(cache, model, kinds, free_bytes, host_kinds=host_kinds)
    if cache.pools != "split":
        host = shared_capacity(host, host_kinds.page_bytes)
    if cache.pools == "shared_both":
        device = shared_capacity(device, kinds.page_bytes)
    return Deployment(
        tp=config.tp,
        cost=cost,
        draft_cost=draft_cost,
        kinds=kinds,
        host_kinds=host_kinds,
        storage_kinds=storage_kinds,
        device=device,
        host=host,
    )
