"""A deployment: an engine's devices, the cost of a step, and the sizes of its pools."""

from dataclasses import dataclass, replace
from typing import Any

from hicache.cache.kinds import Kinds
from hicache.config import ExperimentConfig, HostSizes, WindowHit
from hicache.executor.simulated.drafting import Drafting
from hicache.memory import (
    Capacity,
    capacities,
    engine_rule,
    model_kinds,
    shared_capacity,
    smallest,
)
from hicache.models import PLAIN, ModelConfig
from hicache.models.cost import CostModel
from hicache.models.draft import draft_of, with_draft_kv
from hicache.models.stages import PipelineCost, layers_of_stages, stage_models


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model on the devices of one serving engine, with step costs and memory sizes.

    The kinds of cached data are full-attention KV, sliding-window KV and Mamba states.

    Attributes:
        tp: tensor-parallel size, in devices.
        cost: predicts the duration of a step.
        kinds: the kinds of data that the model caches, with their bytes per page or state on the
            device.
        host_kinds: the same kinds, with their bytes in the host tier's number format.
        storage_kinds: the same kinds, with their bytes in the storage tier's number format.
        device: sizes of the memory pools on the device.
        host: sizes of the memory pools on the host.
        drafting: predicts steps with a draft model; None means no speculation.
        stages: the deployments of its pipeline stages, with the sizes that each has room for; none
            means that it has one.
    """

    tp: int
    cost: CostModel
    kinds: Kinds
    host_kinds: Kinds
    storage_kinds: Kinds
    device: Capacity
    host: Capacity
    drafting: Drafting | None = None
    stages: tuple["Deployment", ...] = ()

    @property
    def num_devices(self) -> int:
        return self.tp * max(len(self.stages), 1)


def deploy(config: ExperimentConfig) -> Deployment:
    """Return the deployment that `config` describes: step costs, page sizes and memory pools.

    Raises:
        ValueError: a memory pool is too small for one request.
    """
    if config.parallel.pp > 1:
        return _deploy_stages(config)
    return _deploy_one(config, config.model)


def _deploy_one(config: ExperimentConfig, plain: ModelConfig) -> Deployment:
    # `plain` is a model, or what a pipeline stage holds of it
    model = plain
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
        is_asynchronous=config.compat.rules.asynchronous,
    )
    replays = config.cache.window is WindowHit.replay
    forms = (model, PLAIN), (lower, config.cache.host_format), (lower, config.storage_format)
    kinds, host_kinds, storage_kinds = (
        model_kinds(each, config.cache.page_size, config.tp, form, replays=replays)
        for each, form in forms
    )
    cache, free_bytes = config.cache, cost.free_device_bytes
    ruled_bytes = engine_rule(cache, model, config.hardware, config.tp)
    if ruled_bytes is not None:
        cache, free_bytes = replace(cache, device_gib=None), ruled_bytes
    drafting = None
    if config.speculation.drafts:
        draft = draft_of(plain, config.speculation.layers)
        head_bytes = round(draft.head_params * max(2.0, draft.dense_param_bytes))
        free_bytes -= draft.weight_bytes - head_bytes
        draft_cost = CostModel(draft, config.hardware, tp=config.tp, ep=config.parallel.ep)
        drafting = Drafting(cost, draft_cost, config.speculation.drafts)
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
        drafting=drafting,
        kinds=kinds,
        host_kinds=host_kinds,
        storage_kinds=storage_kinds,
        device=device,
        host=host,
    )


def _deploy_stages(config: ExperimentConfig) -> Deployment:
    # each stage has an equal part of the memory that is given for the engine; all pools hold as
    # much as the smallest
    pp, cache, model = config.parallel.pp, config.cache, config.model
    layers = layers_of_stages(len(model.layer_words), pp, config.parallel.stage_layers)
    device_gib, host_gib = (
        None if total is None else total / pp for total in (cache.device_gib, cache.host_gib)
    )
    own = replace(config, cache=replace(cache, device_gib=device_gib, host_gib=host_gib))
    stages = [_deploy_one(own, part) for part in stage_models(model, layers)]
    cost = PipelineCost(model, config.hardware, tp=config.tp, stages=[each.cost for each in stages])
    kinds, host_kinds, storage_kinds = (
        model_kinds(model, cache.page_size, config.tp, form)
        for form in (PLAIN, cache.host_format, config.storage_format)
    )
    device, host = (
        smallest([getattr(each, tier) for each in stages], own_kinds.page_bytes)
        for tier, own_kinds in (("device", kinds), ("host", host_kinds))
    )
    return Deployment(
        tp=config.tp,
        cost=cost,
        kinds=kinds,
        host_kinds=host_kinds,
        storage_kinds=storage_kinds,
        device=device,
        host=host,
        stages=tuple(stages),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """What one engine is for, with its own settings: "prefill", "decode", or "both"."""

    role: str
    config: ExperimentConfig
    deployment: Deployment


def places_of(config: ExperimentConfig, deployment: Deployment) -> list[Place]:
    """Return the places of all engines of a run, first those that compute prompts.

    `deployment` is that of `config`, which holds for all engines but those that only decode.

    Raises:
        ValueError: a setting of decode engines is unknown, or their memory is too small.
    """
    parallel = config.parallel
    role = "prefill" if parallel.prefill else "both"
    places = [Place(role=role, config=config, deployment=deployment)]
    if not parallel.prefill:
        return places * parallel.replicas
    own = _of_decode(config)
    decode = Place(role="decode", config=own, deployment=deploy(own))
    return places * parallel.prefill + [decode] * parallel.decode


def _of_decode(config: ExperimentConfig) -> ExperimentConfig:
    # the settings of decode engines
    parallel = config.parallel
    if parallel.decode_cache == "offload" and config.storage.kind == "none":
        raise ValueError(
            "parallel.decode_cache=offload needs a storage engine, got storage.kind=none"
        )
    if parallel.sparse_tokens is not None or parallel.decode_cache != "tiers":
        config = replace(config, storage=replace(config.storage, kind="none"))
    if parallel.sparse_tokens is None and parallel.decode_cache != "tiers":
        cache = replace(config.cache, host_gib=0.0, host=HostSizes(), unlimited=False)
        config = replace(config, cache=cache)
    for key, value in parallel.decode_own.items():
        group, _, name = str(key).partition(".")
        part: Any = getattr(config, group, None)
        if not hasattr(part, name):
            raise ValueError(f"parallel.decode_own has an unknown setting {key}")
        changed: Any = {group: replace(part, **{name: value})}
        config = replace(config, **changed)
    return config
