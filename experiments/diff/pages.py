"""Pages and locks of a side's tree; equal pages have equal names on both sides."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.diff.protocol import TIERS, Pools, Tokens

NAME_BYTES = 8


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


class NodeView(NamedTuple):
    """One node of the radix tree of a compared cache.

    Attributes:
        names: hashes of the node's pages.
        held: kinds and tiers, such as `full/device`, in which the node has data.
        locks: number of locks by kind and tier. A lock of full-attention KV on the device also
            counts on every ancestor.
    """

    names: Sequence[int]
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
        total, tokens = sum(node.names), len(node.names) * pools.page_size
        for place, count in node.locks.items():
            state[f"locked/{place}"] += count * (1 if _is_state(place) else tokens)
        for place in node.held:
            state[f"pages/{place}"] += node.names[-1] if _is_state(place) else total
    return {name: amount % (1 << 8 * NAME_BYTES) for name, amount in state.items()}


def _is_state(place: str) -> bool:
    return place.startswith("mamba/")
