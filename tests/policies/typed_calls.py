"""The types of the decisions of a policy; `make check` runs mypy on this file."""

from typing import assert_type

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.rates import ReadLoad
from hicache.cache.tiers.transfer import Load
from hicache.cache.tree.entry import Entry, Evictable, Rank
from hicache.cache.tree.node import MatchResult
from hicache.policies.policy import Policy
from hicache.policies.routing import Replica
from hicache.request import Request
from hicache.scheduler.request_state import RequestState


def entries(policy: Policy, entry: Entry, queue: Evictable) -> None:
    assert policy.entries is not None
    assert policy.entries.rank is not None
    assert policy.entries.victim is not None
    assert_type(policy.entries.rank(entry, "device", "full"), Rank | None)
    assert_type(policy.entries.victim("device", "full", 1, queue), Entry | None)


def copies(policy: Policy, entry: Entry, load: Load) -> None:
    assert_type(policy.writes.admit(entry, "device", "host", load), bool)


def reads(policy: Policy, prefetch: Prefetch, request: Request, load: ReadLoad) -> None:
    assert policy.reads.deadline_ns is not None
    assert policy.reads.prefetch is not None
    assert_type(policy.reads.may_stop(prefetch, 0), bool)
    assert_type(policy.reads.deadline_ns(prefetch), int | None)
    assert_type(policy.reads.prefetch(request, 0, [64], load), int | None)


def requests(policy: Policy, req: RequestState, match: MatchResult) -> None:
    decides = policy.requests
    assert_type(decides.sort_key(req, match), float)
    assert decides.starts is not None
    assert_type(decides.starts(req.request), bool)
    assert_type(decides.placement.checkpoints("mamba", 0, 64, None), list[int])
    charge = decides.window_charge(
        extend=1, chunk=1, window=1, page=1, swa_host_hit_length=0, max_new=0
    )
    assert_type(charge, int)


def routes(policy: Policy, request: Request, engines: list[Replica]) -> None:
    assert_type(policy.route(request, engines), int)
