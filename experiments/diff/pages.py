"""Pages and locks of a side's tree; equal pages have equal names on both sides."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.diff.protocol import TIERS, Pools, Tokens

NAME_BYTES = 8


def page_names(tokens: Tokens, page_size: int, before: int = 0) -> list[int]:
    """Return [P] names of the whole pages of `tokens`; each depends on all tokens up to its end.

    Args:
        tokens: [T] ids.
        page_size: tokens of a page.
        before: name of the preceding page; 0 means that there is none.
    """
    names = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        text = before.to_bytes(NAME_BYTES) + tokens[start : start + page_size].tobytes()
        before = int.from_bytes(hashlib.blake2b(text, digest_size=NAME_BYTES).digest())
        names.append(before)
    return names


class NodeView(NamedTuple):
    """One node of a side's tree.

    Attributes:
        names: of its pages.
        held: the places, such as `full/device`, where the node has data.
        locks: number of locks by place; a lock of full KV on the device counts on every node of its
            path.
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


def contents_of(nodes: Iterable[NodeView]) -> dict[str, list[int]]:
    """Return names of held pages by place; a state has the name of the page before it."""
    found: dict[str, list[int]] = {}
    for node in nodes:
        for place in node.held:
            names = node.names[-1:] if _is_state(place) else node.names
            found.setdefault(place, []).extend(names)
    return found


def _is_state(place: str) -> bool:
    return place.startswith("mamba/")
