"""The user's own policy: the methods that it may define, and the values that they return."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

from hicache.cache.checked import Answer, PolicyError, checked
from hicache.cache.named import (
    FLAG,
    LENGTHS,
    MOMENT,
    NUMBER,
    RANKING,
    TOKENS,
    built,
    is_number,
    loaded,
    make_policy,
)
from hicache.cache.prefetch.prefetch import Phase
from hicache.cache.prefetch.rates import RateEstimator
from hicache.config import ExperimentConfig
from hicache.engine.deployment import Deployment
from hicache.engine.loop import Engine, Router
from hicache.engine.routing import Replica
from hicache.policies.eviction import POLICIES
from hicache.policies.stock import STOCK
from hicache.policies.world import World
from hicache.request import Request
from hicache.scheduler.checkpoints import Placement


def _is_rank(value: object) -> bool:
    for each in value if type(value) is tuple else (value,):
        if type(each) not in (float, int) or not -inf < each < inf:  # numbers of other types
            return value is None or is_number(value) or RANKING.fits(value)
    return value != ()


ANYTHING = Answer("anything", lambda value: True, shows=False)
METHODS = {
    "on_insert": ANYTHING,  # (entry, tier): the tier now holds its data
    "on_hit": ANYTHING,  # (entry, request): the request starts from it
    "on_miss": ANYTHING,  # (keys, request): keys of the whole prompt pages that it must compute
    "on_split": ANYTHING,  # (entry, first): `first` is the new entry of its first pages
    "on_evict": ANYTHING,  # (entry, tier, why): it left the tier; demoted, evicted or lost
    "on_finish": ANYTHING,  # (request, outcome): finished, rejected or aborted
    # (entry, tier, kind): the smallest is evicted first; None keeps the default order, which is LRU
    "rank": Answer("a finite number, a tuple of them, or None", _is_rank, shows=False),
    # (tier, kind, need, queue): the entry of the queue to evict for `need` pages (or states); None
    # leaves it to the ranks
    "victim": ANYTHING,
    # (entry, source, target, load): True to copy it from device to host, or from host to storage;
    # None leaves it to `cache.write_policy` or `storage.write`
    "admit": Answer("True, False or None", lambda v: v is None or FLAG.fits(v), shows=False),
    "demotes": FLAG,  # an attribute: `admit` may copy data that the device is about to evict
    # (request, held, restorable, load): tokens to read after the `held` ones in the cache;
    # `restorable`: lengths that storage can restore. None reads the longest of them
    "prefetch": Answer("None or a whole number of tokens", lambda v: v is None or TOKENS.fits(v)),
    "may_stop": FLAG,  # (prefetch, now_ns): True to run the request with the pages read so far
    "deadline_ns": MOMENT,  # (prefetch): time at which `may_stop` changes; None means never
    # (kind, start, end, branch): prompt lengths at which a window or state is kept; None leaves it
    # to `cache.windows` or `cache.checkpoints`
    "checkpoints": Answer(
        "a list of whole numbers or None", lambda v: v is None or LENGTHS.fits(v), shows=False
    ),
    "sort_key": NUMBER,  # (req, match): rank of a waiting request, smallest first
    "route": Answer("None or the number of an engine", lambda v: v is None or TOKENS.fits(v)),
}


def policy_of(
    config: ExperimentConfig,
    deployment: Deployment,
    rates: RateEstimator,
    now_ns: Callable[[], int],
    requests: Sequence[Request] = (),
) -> SimpleNamespace:
    """Build the policies that the config names; methods of `cache.policy` replace built-in ones.

    Raises:
        ValueError: there is no such class, or it does not accept the arguments.
        PolicyError: a user's class cannot be used.
    """
    cache, world = config.cache, _world(config, deployment, rates, now_ns, requests)
    methods = SimpleNamespace()
    if cache.eviction != "lru" or cache.eviction_args:
        wants = {"rank": METHODS["rank"]}
        name, knobs = cache.eviction, cache.eviction_args
        preset: Any = make_policy("cache.eviction", name, POLICIES, world, wants=wants, knobs=knobs)
        methods.rank = preset.rank
    if cache.policy != "none":
        vars(methods).update(vars(own_policy(cache.policy, world, cache.policy_args)))
    if hasattr(methods, "prefetch"):
        methods.prefetch = _with_load(methods.prefetch, rates, cache.page_size)
    if config.parallel.ranks > 1 and hasattr(methods, "prefetch"):
        raise ValueError(
            f"cache.policy={cache.policy} has a method prefetch, which needs parallel.ranks=1, got "
            f"{config.parallel.ranks}: ranks measure different rates and must read alike"
        )
    return methods


def own_policy(name: str, world: World, arguments: Mapping[str, float]) -> SimpleNamespace:
    """Build the class of `cache.policy`, with checks of each return value and exception.

    Returns the methods of `METHODS` that it defines, and nothing else.

    Raises:
        ValueError: there is no such class, or it does not accept the arguments.
        PolicyError: it cannot be built, defines none of the methods, or defines an unknown event.
    """
    told = f"cache.policy={name}"
    policy: object = built(
        told, STOCK.get(name) or loaded("cache.policy", name), (world,), arguments
    )
    wanted = {
        each: answer
        for each, answer in METHODS.items()
        if callable(getattr(policy, each, None)) or (each == "demotes" and hasattr(policy, each))
    }
    unknown = [each for each in dir(policy) if each.startswith("on_") and each not in METHODS]
    if unknown or not wanted:
        fault = f"has an unknown event {unknown[0]}" if unknown else "has no method of a policy"
        raise PolicyError(f"{told} {fault}: the methods are {', '.join(METHODS)}")
    methods = checked(told, policy, wanted)
    if "may_stop" in wanted:
        methods.waits, methods.uses_clock = True, "deadline_ns" in wanted
        methods.deadline_ns = getattr(methods, "deadline_ns", lambda prefetch: None)
    return methods


def _world(
    config: ExperimentConfig,
    deployment: Deployment,
    rates: RateEstimator,
    now_ns: Callable[[], int],
    requests: Sequence[Request],
) -> World:
    kinds, names = deployment.kinds, deployment.kinds.names
    tiers = {"device": (deployment.device, kinds), "host": (deployment.host, deployment.host_kinds)}
    return World(
        page_size=kinds.page_size,
        seed=config.seed,
        kinds=tuple(names[kind] for kind in kinds.numbers),
        capacity={
            tier: {names[kind]: room.counts[kind] for kind in kinds.numbers}
            for tier, (room, _) in tiers.items()
        },
        unit_bytes={
            tier: {names[kind]: own.page_bytes[kind] for kind in kinds.numbers}
            for tier, (_, own) in tiers.items()
        },
        window_tokens={names[kind]: length for kind, length in kinds.window_lens.items()},
        flops=deployment.cost.flops,
        seconds=deployment.cost.prefill_s,
        rates=rates,
        now_ns=now_ns,
        config=config,
        requests=requests,
    )


class ReadLoad(NamedTuple):
    """The load when a policy decides how much to read; times are None before the first measurement.

    `queued_tokens`: tokens that reads for other requests still have to read. `num_waiting`:
    requests in the queue.
    """

    queued_tokens: int
    num_waiting: int
    read_ns: float | None  # per token
    compute_ns: float | None  # per token


def _with_load(
    choose: Callable[..., int | None], rates: RateEstimator, page: int
) -> Callable[..., int | None]:
    def chosen(request: Request, held: int, restorable: list[int]) -> int | None:
        reading = [each for each in rates.active.values() if each.phase is Phase.reading]
        load = ReadLoad(
            queued_tokens=page * sum(p.num_pages - p.completed_pages for p in reading),
            num_waiting=rates.num_waiting,
            read_ns=None if rates.page_ns is None else rates.page_ns / page,
            compute_ns=rates.compute_ns(1),
        )
        return choose(request, held, restorable, load)

    return chosen


class OwnPlacement:
    """The lengths that the user's policy returns; None means those of a built-in placement."""

    def __init__(
        self, choose: Callable[..., list[int] | None], kind: str, default: Placement
    ) -> None:
        self._choose = choose
        self._kind = kind
        self._default = default

    def lengths(self, start: int, end: int, branch: int | None) -> Iterable[int]:
        chosen = self._choose(self._kind, start, end, branch)
        return self._default.lengths(start, end, branch) if chosen is None else chosen


class OwnRouter:
    """Routes by the first engine's user policy; None means by a built-in router."""

    def __init__(self, choose: Callable[..., int | None], default: Router) -> None:
        self._choose = choose
        self._default = default

    def route(self, request: Request, engines: Sequence[Engine]) -> int:
        number = self._choose(request, [Replica(each) for each in engines])
        if number is None:
            return self._default.route(request, engines)
        if number >= len(engines):
            raise PolicyError(
                f"cache.policy: route must return a number below {len(engines)}, got {number}"
            )
        return int(number)
