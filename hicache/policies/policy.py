"""The policy of an engine: the methods of a user's class, and built-in ones for the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from hicache.cache.checked import Answer, PolicyError, checked
from hicache.cache.named import (
    FLAG,
    LENGTHS,
    MOMENT,
    NUMBER,
    RANK,
    TOKENS,
    built,
)
from hicache.cache.prefetch.prefetcher import ReadPolicy
from hicache.cache.tiers.transfer import EVICTED, MOMENTS, WritePolicy
from hicache.cache.tree.entry import EntryPolicy
from hicache.policies.checkpoints import PLACEMENTS
from hicache.policies.order import ORDERS
from hicache.policies.routing import Route, router_named
from hicache.policies.stock import STOCK
from hicache.policies.stop import STOPS
from hicache.policies.window_charge import swa_budget_for_req
from hicache.policies.world import World
from hicache.policies.writes import COPIES, WRITES, downward
from hicache.scheduler.checkpoints import Placement
from hicache.scheduler.prefill import SchedulerPolicy
from hicache.user_code import loaded, place_of, user_code

Part = TypeVar("Part", EntryPolicy, WritePolicy, ReadPolicy, SchedulerPolicy)


ANYTHING = Answer("anything", lambda value: True, shows=False)
# what each method of a user's class may return; `Policy` says what the methods do
METHODS = {
    "on_insert": ANYTHING,
    "on_hit": ANYTHING,
    "on_miss": ANYTHING,
    "on_split": ANYTHING,
    "on_evict": ANYTHING,
    "on_arrive": ANYTHING,
    "on_finish": ANYTHING,
    "rank": RANK,
    "victim": ANYTHING,  # checked where it is called
    "admit": Answer("True, False or None", lambda v: v is None or FLAG.fits(v), shows=False),
    "demotes": FLAG,
    "prefetch": Answer("None or a whole number of tokens", lambda v: v is None or TOKENS.fits(v)),
    "may_stop": FLAG,
    "deadline_ns": MOMENT,
    "checkpoints": Answer(
        "a list of whole numbers or None", lambda v: v is None or LENGTHS.fits(v), shows=False
    ),
    "sort_key": NUMBER,
    "starts": FLAG,
    "window_charge": TOKENS,
    "route": Answer("None or the number of an engine", lambda v: v is None or TOKENS.fits(v)),
}
# methods of earlier releases, with those that replace them
RENAMED = {
    "priority": "rank(entry, tier, kind)",
    "lengths": "checkpoints(kind, start, end, branch)",
    "tokens": "window_charge(*, extend, chunk, window, page, swa_host_hit_length, max_new)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The decisions of one engine, each as a function that takes it.

    Each part documents its methods, and is given to the module that calls them. A user's class may
    have any of these methods. It may return None in `rank`, `victim`, `prefetch`, `admit`,
    `checkpoints` and `route`: the built-in policy that the settings name then decides. With
    `checkpoints`, nothing more is kept at the ends of chunks. A class with the attribute `demotes =
    True` is also asked by `admit` about data that the device is about to evict.

    Attributes:
        entries: ranks entries and is told of events; None means LRU, without entries.
        writes: says what is copied to the host and to storage.
        reads: says how much is read from storage, and how long a request waits for it.
        requests: orders the waiting requests, charges them, and says what is kept of a prompt.
        route: (request, engines): the index of the engine that serves a request. Only the policy
            of the first engine is asked, once for each request. Example: `return request.id %
            len(engines)`.
    """

    entries: EntryPolicy | None
    writes: WritePolicy
    reads: ReadPolicy
    requests: SchedulerPolicy
    route: Route


def policy_of(world: World) -> Policy:
    """Build the policies that `world.config` names. All of them get `world`.

    The methods of the class that `cache.policy` names replace built-in ones.

    Raises:
        ValueError: the user's class does not exist, does not accept its arguments, or has a method
            that does not work with several ranks.
        PolicyError: the user's class fails, or its methods are not those of a policy.
    """
    cache, num_ranks = world.config.cache, world.config.parallel.ranks
    policy = presets(world)
    if cache.policy == "lru":
        return policy
    own = own_policy(cache.policy, world, cache.policy_args)
    if num_ranks > 1 and "prefetch" in own:
        raise ValueError(
            f"cache.policy={cache.policy} has a method prefetch, which needs parallel.ranks=1, got "
            f"{num_ranks}: ranks measure different rates and must read alike"
        )
    return with_methods(policy, own)


def presets(world: World) -> Policy:
    """Return the built-in policies that `world.config` names, without that of `cache.policy`."""
    config = world.config
    has_states = config.model.num_mamba_layers > 0
    place = PLACEMENTS[config.cache.checkpoints or ("chunk_branch" if has_states else "end_branch")]
    copies = COPIES[config.cache.write_policy](world)
    return Policy(
        entries=None,
        writes=downward(copies, WRITES[config.storage.write](world)),
        reads=STOPS[config.prefetch.stop](world),
        requests=SchedulerPolicy(
            sort_key=ORDERS[config.scheduler.order](world),
            window_charge=partial(swa_budget_for_req, config.scheduler.swa_budget),
            placement=place(world),
        ),
        route=router_named(config.parallel.router, config.parallel.router_args).route,
    )


def with_methods(policy: Policy, own: Mapping[str, Any]) -> Policy:
    """Return `policy` with the methods `own`, by name, in place of its own ones."""
    writes, requests, placement = policy.writes, policy.requests, policy.requests.placement
    if "admit" in own:
        moments = {target: frozenset(MOMENTS) for target in writes.moments}
        if not (writes.demotes or own.get("demotes", False)):
            moments["host"] -= {EVICTED}
        writes = WritePolicy(_either(own["admit"], writes.admit), moments)
    if "checkpoints" in own:  # it alone says where states and windows are kept
        asked = _either(own["checkpoints"], placement.checkpoints)
        requests = replace(requests, placement=Placement(asked))
    reads = policy.reads
    if "may_stop" in own:
        reads = ReadPolicy(own["may_stop"], prefetch=reads.prefetch)
    return Policy(
        entries=_replaced(policy.entries or EntryPolicy(), own),
        writes=writes,
        reads=_replaced(reads, own),
        requests=_replaced(requests, own),
        route=_either(own["route"], policy.route) if "route" in own else policy.route,
    )


def _replaced(part: Part, own: Mapping[str, Any]) -> Part:
    names = [each.name for each in fields(part) if each.name in own]
    return replace(part, **{name: own[name] for name in names})


def _either(own: Callable[..., Any], preset: Callable[..., Any]) -> Callable[..., Any]:
    def decided(*arguments: object) -> Any:
        given = own(*arguments)
        return preset(*arguments) if given is None else given

    return decided


def _methods_of(policy: object) -> tuple[dict[str, Answer], str]:
    # the methods of a policy that it has, and what is wrong with them
    wanted = {
        each: answer
        for each, answer in METHODS.items()
        if callable(getattr(policy, each, None)) or (each == "demotes" and hasattr(policy, each))
    }
    unknown = [each for each in dir(policy) if each.startswith("on_") and each not in METHODS]
    fault = ""
    if unknown:
        fault = f"has an unknown event {unknown[0]}"
    elif "deadline_ns" in wanted and "may_stop" not in wanted:
        fault = "has deadline_ns without may_stop"
    elif not wanted:
        fault = "has no method of a policy"
    return wanted, fault or _misspelt(policy, wanted)


def _misspelt(policy: object, wanted: Mapping[str, Answer]) -> str:
    # a method that the cache never calls, with a name close to one that the class does not have
    others = [each for each in dir(policy) if each[0] != "_" and each not in METHODS]
    for each in others:
        (near,) = get_close_matches(each, METHODS, n=1, cutoff=0.8) or (None,)
        if near is not None and near not in wanted and callable(getattr(policy, each, None)):
            return f"has a method {each} (did you mean {near}?)"
    return ""


def own_policy(name: str, world: World, arguments: Mapping[str, float]) -> dict[str, Any]:
    """Build the policy class `name`, and return its methods by name.

    The class is called with `world` and the keyword arguments `arguments`. Each returned method
    raises an error if the user's method fails or returns a wrong value.

    Raises:
        ValueError: there is no such class, or it does not accept the arguments.
        PolicyError: the class fails, has no method of a policy, or handles an unknown event.
    """
    told, make = f"cache.policy={name}", STOCK.get(name) or loaded("cache.policy", name)
    names = ", ".join(METHODS)
    old = [f"{each} is now {RENAMED[each]}" for each in RENAMED if hasattr(make, each)]
    if old and not any(hasattr(make, each) for each in METHODS):
        raise PolicyError(f"{told}: {', '.join(old)}; the methods are {names}", place_of(make))
    try:
        policy: object = built(told, make, (world,), arguments)
    except ValueError as error:
        raise ValueError(f"{error}; it gets a World and cache.policy_args") from error
    with user_code(f"{told}: its attributes"):  # some may be properties of the user
        wanted, fault = _methods_of(policy)
    if fault:
        raise PolicyError(f"{told} {fault}: the methods are {names}", place_of(type(policy)))
    if name in STOCK:
        return {each: getattr(policy, each) for each in wanted}
    return checked(told, policy, wanted)
