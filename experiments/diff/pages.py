"""Pages and locks of a side's tree; equal pages have equal names on both sides."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.diff.protocol import TIERS, Pools, Tokens

NAME_BYTES = 8
STATES = ("mamba/device", "mamba/host")


def page_names(tokens: Tokens, page_size: int, before: int = 0) -> list[int]:
    """Return a hash for each full page of `tokens`.

    A hash depends on the tokens of its page and on all tokens before the page.

    Args:
        tokens: token ids, one axis.
        page_size: tokens per page.
        before: hash of the page before the first one. 0 means that there is none.
    """
    names = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        text = before.to_bytes(NAME_BYTES) + tokens[start : start + page_size].tobytes()
        before = int.from_bytes(hashlib.blake2b(text, digest_size=NAME_BYTES).digest())
        names.append(before)
    return names


class PageSpan(NamedTuple):
    """The pages of one node: how many, the sum of their hashes, and the hash of the last one."""

    num_pages: int
    total: int
    last: int


def page_span(tokens: Tokens, page_size: int, before: int = 0) -> PageSpan:
    names = page_names(tokens, page_size, before)
    return PageSpan(len(names), sum(names), names[-1])


class NodeView(NamedTuple):
    """One node of the radix tree of a compared cache.

    Attributes:
        pages: the node's pages.
        held: kinds and tiers, such as `full/device`, in which the node has data.
        locks: number of locks by kind and tier, where there are any. A lock of full-attention KV on
            the device also counts on every ancestor.
    """

    pages: PageSpan
    held: Sequence[str]
    locks: Mapping[str, int]


def state_of(nodes: Iterable[NodeView], pools: Pools) -> dict[str, int]:
    state = {
        f"{area}/{kind}/{tier}": 0
        for area in ("locked", "pages")
        for kind in pools.components
        for tier in TIERS[:2]
    }
    for node in nodes:
        count, total, last = node.pages
        for place, locks in node.locks.items():
            state[f"locked/{place}"] += locks * (1 if place in STATES else count * pools.page_size)
        for place in node.held:
            state[f"pages/{place}"] += last if place in STATES else total
    return {name: amount % (1 << 8 * NAME_BYTES) for name, amount in state.items()}
