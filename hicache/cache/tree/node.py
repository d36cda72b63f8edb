"""A node of the radix tree, a lock on it, and the result of a match.

Tiers and kinds are small integers, because they index lists in the hottest code.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hicache.cache.kinds import FULL, KEY_TAGS, KIND_NAMES, MAMBA, SWA
from hicache.cache.pages import PageIds

DEVICE = 0
HOST = 1
TIERS = (DEVICE, HOST)
TIER_NAMES = ("device", "host")
NO_ENTRIES: dict[int, Any] = {}  # shared; must not be changed


class Node:
    """The pages `[start, end)` of every sequence that passes through this node.

    `held[tier][kind]` are page ids, one per page, or one slot for a state (after the last token).
    None makes the node a *tombstone* of that kind. `locks[tier][kind]` counts the locks that forbid
    eviction from that tier. Full KV on the device is locked by whole paths instead: `path_locks`
    counts the locks that end at this node, plus one per locked child.

    A split keeps this object as the lower half, so a reference to a node and its end stays valid.
    """

    def __init__(
        self,
        parent: "Node | None",
        edge: bytes,
        start: int,
        num_pages: int,
        num_kinds: int = len(KIND_NAMES),
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.end = start + num_pages
        self.children: dict[bytes, Node] = {}
        nothing: list[PageIds | None] = [None] * num_kinds
        self.held = (nothing, nothing.copy())
        self.locks = ([0] * num_kinds, [0] * num_kinds)
        self.path_locks = 0
        self.num_device_children = 0  # children with full on the device
        self.hit_count = 0
        self.tick = 0  # last use
        self.aux_ticks = [0] * num_kinds  # by kind: when its window or state last ended a match
        self.created = 0  # number in the order of creation; both halves of a split keep it
        self.digests: list[bytes] | None = None  # one per page; None until storage needs them
        self.stored = [False] * num_kinds  # by kind: storage has received it, or had it
        self.seed: bytes | None = None  # roots only: start of the digest chain
        self.entries = NO_ENTRIES  # by kind: the `Entry` that a user's policy sees

    @property
    def num_pages(self) -> int:
        return self.end - self.start

    @property
    def uses(self) -> int:
        return self.hit_count

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self, start: int = 0) -> Iterator["Node"]:
        """Yield this node and its ancestors down to the one that holds page `start`, bottom up."""
        node = self
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    def span(self, start: int = 0) -> list["Node"]:
        """The nodes of pages `[start, end)`, top down; `start` was once the start of a node."""
        return list(self.path(start))[::-1]

    def __repr__(self) -> str:
        tiers = "/".join(
            "".join(
                chr(tag)
                for tag, held in zip(KEY_TAGS, self.held[tier], strict=False)
                if held is not None
            )
            or "-"
            for tier in TIERS
        )
        locks = f"{self.path_locks} {self.locks}"
        return f"<Node pages [{self.start}, {self.end}) {tiers} locks {locks}>"


class Lock(NamedTuple):
    """What one lock protects, and what its release must undo.

    `starts` holds (kind, first page): the lock covers that kind from the node that starts there to
    `node.end`; of a state, only the node's own slot. A device lock always covers the full KV of the
    path and the state, so its `starts` lists windows only.
    """

    tier: int
    node: Node
    starts: Sequence[tuple[int, int]]


class MatchResult(NamedTuple):
    """The longest reusable prefix in tokens, at two boundaries: on the device, and on any tier.

    `host_hits`: by kind, the part of the hit that only the host holds: full tokens between the two
    boundaries; window tokens before the any-tier boundary, rounded up to pages; 1 if the state
    there. `full_len`: matched tokens, whether or not the other kinds allow their use.
    """

    device_prefix_len: int
    usable_len: int
    full_len: int
    host_hits: tuple[int, ...]
    device_node: Node
    best_node: Node

    @property
    def host_hit_length(self) -> int:
        return self.host_hits[FULL]

    @property
    def swa_host_hit_length(self) -> int:
        return self.host_hits[SWA]

    @property
    def mamba_host_hit_length(self) -> int:
        return self.host_hits[MAMBA]

    @property
    def needs_sidecars(self) -> bool:
        return any(self.host_hits[FULL + 1 :])

    @property
    def needs_host_load_back(self) -> bool:
        return any(self.host_hits)

    def without_host(self) -> "MatchResult":
        return self._replace(
            usable_len=self.device_prefix_len,
            full_len=self.device_prefix_len,
            host_hits=(0,) * len(self.host_hits),
            best_node=self.device_node,
        )

    def without_hit(self) -> "MatchResult":
        root = self.device_node
        while root.parent is not None:
            root = root.parent
        return self.without_host()._replace(
            device_prefix_len=0, usable_len=0, full_len=0, device_node=root, best_node=root
        )

    @property
    def branch_len(self) -> int | None:
        """Where a new state would let the next such request start later; None if nowhere."""
        return self.full_len if self.full_len > self.usable_len else None
