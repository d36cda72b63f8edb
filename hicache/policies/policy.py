"""The policy of an engine: the methods of a user's class, and built-in ones for the rest."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

from hicache.cache.checked import Answer, PolicyError, checked
from hicache.cache.named import (
    FLAG,
    LENGTHS,
    MOMENT,
    NUMBER,
    RANKING,
    TOKENS,
    built,
    is_rankable,
)
from hicache.cache.tiers.transfer import MOMENTS
from hicache.policies.checkpoints import PLACEMENTS
from hicache.policies.eviction import EVICTIONS
from hicache.policies.order import ORDERS
from hicache.policies.routing import ROUTERS
from hicache.policies.stock import STOCK
from hicache.policies.stop import STOPS
from hicache.policies.window_charge import swa_budget_for_req
from hicache.policies.world import World
from hicache.policies.writes import COPIES, WRITES, Downward
from hicache.user_code import loaded, place_of, user_code


def _is_rank(value: object) -> bool:
    for each in value if type(value) is tuple else (value,):
        if type(each) not in (float, int) or not -inf < each < inf:  # numbers of other types
            return value is None or is_rankable(value) or RANKING.fits(value)
    return value != ()


ANYTHING = Answer("anything", lambda value: True, shows=False)
METHODS = {
    "on_insert": ANYTHING,  # (entry, tier): the tier now holds its data
    "on_hit": ANYTHING,  # (entry, request): the request starts from it
    "on_miss": ANYTHING,  # (keys, request): keys of the whole prompt pages that it must compute
    "on_split": ANYTHING,  # (entry, first): `first` is the new entry of its first pages
    "on_evict": ANYTHING,  # (entry, tier, why): it left the tier; demoted, evicted or lost
    "on_finish": ANYTHING,  # (request, outcome): finished, rejected or aborted
    # (entry, tier, kind): the smallest is evicted first; None leaves it to `cache.eviction`.
    # The cache calls it at an eviction: for new entries, and again for the entry that was ranked
    # smallest. So ranks may rise with time. If a rank falls, the entry keeps its old place in line
    "rank": Answer("a finite number, a tuple of them, or None", _is_rank, shows=False),
    # (tier, kind, need, queue): the entry of the queue to evict for `need` pages (or states) of
    # `kind`; with cache.pools=shared, the host's queue has entries of all kinds. None leaves it to
    # the ranks
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
    # (kind, start, end, branch): prompt lengths at which a window or state is kept, in any order.
    # They are rounded down to pages; those outside (start, end] are dropped. `start`: tokens that
    # need not be computed. `end`: the last page boundary. `branch`: where the prompt leaves an edge
    # that has no state or window there. None leaves it to `cache.windows` or `cache.checkpoints`.
    # With this method, nothing more is kept at the ends of chunks
    "checkpoints": Answer(
        "a list of whole numbers or None", lambda v: v is None or LENGTHS.fits(v), shows=False
    ),
    "sort_key": NUMBER,  # (req, match): rank of a waiting request, smallest first
    # (*, extend, chunk, window, page, swa_host_hit_length, max_new): tokens that a request is
    # charged in a window pool (`hicache.policies.window_charge`); must not fall as `extend` and
    # `chunk` grow, because admission finds the longest chunk that fits by bisection
    "window_charge": TOKENS,
    # (request, engines): number of the engine that serves it; None leaves it to `parallel.router`
    "route": Answer("None or the number of an engine", lambda v: v is None or TOKENS.fits(v)),
}
# where None leaves the decision to the built-in policy
SHARED = ("rank", "admit", "checkpoints", "route")
# methods of earlier releases, with those that replace them
RENAMED = {
    "priority": "rank(entry, tier, kind)",
    "lengths": "checkpoints(kind, start, end, branch)",
    "tokens": "window_charge(*, extend, chunk, window, page, swa_host_hit_length, max_new)",
}


def policy_of(world: World) -> SimpleNamespace:
    """Build the policies that `world.config` names, as one object with a method for each decision.

    The methods of the user's class, which `cache.policy` names, replace built-in ones. All policies
    get `world`.

    Raises:
        ValueError: the user's class does not exist, does not accept its arguments, or has a method
            that does not work with several ranks.
        PolicyError: the user's class fails, or its methods are not those of a policy.
    """
    cache, num_ranks = world.config.cache, world.config.parallel.ranks
    policy = presets(world)
    if cache.policy == "none":
        return policy
    own = own_policy(cache.policy, world, cache.policy_args)
    if num_ranks > 1 and hasattr(own, "prefetch"):
        raise ValueError(
            f"cache.policy={cache.policy} has a method prefetch, which needs parallel.ranks=1, got "
            f"{num_ranks}: ranks measure different rates and must read alike"
        )
    if hasattr(own, "may_stop"):
        policy.waits, policy.deadline_ns = True, None
    if hasattr(own, "admit"):
        policy.moments = dict.fromkeys(policy.moments, frozenset(MOMENTS))
        own.demotes = policy.demotes or getattr(own, "demotes", False)
    if hasattr(own, "checkpoints"):  # it alone says where states and windows are kept
        policy.in_chunk, policy.publishes_end = None, True
    for name in SHARED:
        if hasattr(own, name) and hasattr(policy, name):
            setattr(own, name, _either(getattr(own, name), getattr(policy, name)))
    vars(policy).update(vars(own), has_entries=True)
    return policy


def presets(world: World) -> SimpleNamespace:
    """Return the built-in policies that `world.config` names.

    Each decision, such as eviction or routing, is a method or attribute of the returned object.
    """
    config = world.config
    has_states = config.model.num_mamba_layers > 0
    place = PLACEMENTS[config.cache.checkpoints if has_states else config.cache.windows]
    placement = _made(place, world)
    eviction = _made(EVICTIONS[config.cache.eviction], world)
    order = _made(ORDERS[config.scheduler.order], world)
    stop = _made(STOPS[config.prefetch.stop], world)
    copies = _made(COPIES[config.cache.write_policy], world)
    writes = Downward(copies, _made(WRITES[config.storage.write], world))
    methods = SimpleNamespace(
        moments=writes.moments,
        demotes=writes.demotes,
        admit=writes.admit,
        prefetch=None,
        waits=getattr(stop, "waits", True),
        may_stop=stop.may_stop,
        deadline_ns=getattr(stop, "deadline_ns", None),
        checkpoints=placement.checkpoints,
        in_chunk=getattr(placement, "in_chunk", None),
        publishes_end=getattr(placement, "publishes_end", True),
        sort_key=order.sort_key,
        window_charge=partial(swa_budget_for_req, config.scheduler.swa_budget),
        route=_made(ROUTERS[config.parallel.router], world).route,
        has_entries=hasattr(eviction, "rank"),
    )
    if methods.has_entries:
        methods.rank = eviction.rank
    return methods


def _made(make: Any, world: World) -> Any:
    return make() if make.__init__ is object.__init__ else make(world)


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


def own_policy(name: str, world: World, arguments: Mapping[str, float]) -> SimpleNamespace:
    """Build the user's policy class `name`, and return its policy methods as one object.

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
    return checked(told, policy, wanted)
