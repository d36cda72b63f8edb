"""Disjoint windows of a workload, each replayed alone: the replicates of a comparison.

With fixed arrival times a window is a time interval, and the requests of the `warm_up_s` before it
are replayed first and not counted. All windows are equally long, and the first one starts at the
end of its warm-up. If requests depend on answers, a window is a fixed set of sessions with their
sub-agents, the same under every seed.
"""

from collections.abc import Sequence
from dataclasses import replace

from hicache.clock import SECOND_NS, to_ns
from hicache.config import WorkloadConfig
from hicache.request import Request


def cut_window(requests: Sequence[Request], config: WorkloadConfig) -> list[Request]:
    """Return the requests of one window of a workload, with their ids unchanged.

    `config.slice` says into how many windows the workload is cut, and which one is returned. With
    fixed arrival times, a window is a time interval. The result then starts at time 0 with the
    warm-up before the window. If requests wait for answers, a window is a set of whole sessions.

    Raises:
        ValueError: the window holds no request.
    """
    if not config.is_timed:
        return _share_of_trees(requests, config)
    part, num_parts = config.part
    warm_up_ns, last_ns = to_ns(config.warm_up_s), requests[-1].arrival_ns
    begin_ns = requests[0].arrival_ns + warm_up_ns
    start_ns, end_ns = (
        begin_ns + round(edge * (last_ns + 1 - begin_ns) / num_parts) for edge in (part, part + 1)
    )
    if not any(start_ns <= request.arrival_ns < end_ns for request in requests):
        raise _nothing_in(
            config,
            f"{len(requests)} requests within {(last_ns - begin_ns) / SECOND_NS:g} s after "
            f"workload.warm_up_s={config.warm_up_s:g}",
        )
    opening_ns = start_ns - warm_up_ns
    return [
        replace(request, arrival_ns=request.arrival_ns - opening_ns)
        for request in requests
        if opening_ns <= request.arrival_ns < end_ns
    ]


def trees(requests: Sequence[Request]) -> dict[int, int]:
    """Return the root session of each request, by request id.

    The root session of a sub-agent's request is the session that started the sub-agent, directly or
    not. The root session of any other request is its own session.
    """
    tree_of: dict[int, int] = {}
    for request in requests:
        # turns of one session stay together even if their parents are not among the requests
        parent = request.parent_id
        tree_of[request.id] = request.session_id if parent is None else tree_of[parent]
    return tree_of


def _share_of_trees(requests: Sequence[Request], config: WorkloadConfig) -> list[Request]:
    part, num_parts = config.part
    tree_of = trees(requests)
    names = sorted(set(tree_of.values()))
    first, end = (round(edge * len(names) / num_parts) for edge in (part, part + 1))
    kept = set(names[first:end])
    if not kept:
        raise _nothing_in(config, f"{len(names)} sessions")
    return [request for request in requests if tree_of[request.id] in kept]


def _nothing_in(config: WorkloadConfig, got: str) -> ValueError:
    return ValueError(
        f"workload.slice={config.slice} is empty: each slice needs at least one request, and the "
        f"workload has {got}"
    )
