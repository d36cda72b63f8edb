"""A node of the radix tree, a lock on it, and the result of a match.

Tiers and kinds are small integers, because they index lists in the hottest code.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hicache.cache.kinds import FULL, KEY_TAGS, KIND_NAMES, MAMBA, SWA
from hicache.cache.pages import PageIds

DEVICE = 0
HOST = 1
TIERS = (DEVICE, HOST)
TIER_NAMES = ("device", "host")
NO_END = sys.maxsize
NO_ENTRIES: dict[int, Any] = {}  # shared; must not be changed


class Node:
    """A radix-tree node: a run of pages that several prompts may have in common.

    The pages are those from `start` to `end` (excluded) of the prompts. `held[tier][kind]` are page
    ids, or one slot for a Mamba state at the end of the node. None means that the tier does not
    hold the data. `locks[tier][kind]` counts the locks that prevent eviction. For full-attention KV
    on the device, `path_locks` counts instead: the locks that end at this node, plus one per locked
    child. When a node is split, this object becomes the lower half.
    """

    # its full KV came from the host without that of the draft (`speculation.draft_kv=none`)
    is_cold = False

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
        self.num_children = [0, 0]  # by tier: children with full there
        self.uses = 0  # requests that reused or inserted the node
        self.tick = 0  # last use
        self.aux_ticks = [0] * num_kinds  # by kind: when its window or state last ended a match
        # with `trims`, a list of its own: last use of the host's copies; 0 means as full KV
        self.host_ticks = self.aux_ticks
        self.created = 0  # number in the order of creation; both halves of a split keep it
        self.digests: list[bytes] | None = None  # one per page; None until storage needs them
        # by kind: True if storage has received it, or had it; None if its last write was dropped
        self.stored: list[bool | None] = [False] * num_kinds
        self.namespace = ""  # roots only: whose prompts the tree below it holds
        self.entries = NO_ENTRIES  # by kind: the `Entry` that a user's policy sees

    @property
    def num_pages(self) -> int:
        return self.end - self.start

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self, start: int = 0) -> Iterator["Node"]:
        """Yield this node and its ancestors, bottom up, to the node that holds page `start`.

        The root is not included.
        """
        node = self
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    def span(self, start: int = 0) -> list["Node"]:
        """Return the nodes from page `start` to the end of this node, from the top down.

        A node on the path to this node must begin at page `start`.
        """
        return list(self.path(start))[::-1]

    def __repr__(self) -> str:
        device, host = [
            "".join(chr(tag) for tag, ids in zip(KEY_TAGS, held, strict=False) if ids is not None)
            for held in self.held
        ]
        locks = f"{self.path_locks} {self.locks}"
        return (
            f"<Node pages [{self.start}, {self.end}) {device or '-'}/{host or '-'} locks {locks}>"
        )


def make_root(namespace: str, num_kinds: int = len(KIND_NAMES)) -> Node:
    root = Node(None, b"", 0, 0, num_kinds)
    root.namespace = namespace
    return root


class Lock(NamedTuple):
    """A lock that protects data on the path to `node` from eviction from one tier.

    `starts` holds pairs (kind of data, first page): the lock covers that kind from that page to the
    end of `node`. Of Mamba states, the lock covers only the state of `node`. A device lock always
    covers this state and the full-attention KV of the whole path. Its `starts` lists only sliding
    windows, which it covers to page `windows_end`.
    """

    tier: int
    node: Node
    starts: Sequence[tuple[int, int]]
    windows_end: int = NO_END


class MatchResult(NamedTuple):
    """The longest cached prefix of a prompt, in tokens.

    A request can reuse `device_prefix_len` tokens from the device alone. It can reuse `usable_len`
    tokens if data on the host is loaded to the device. The two prefixes end at `device_node` and
    `best_node`. `host_hits` says by kind of data how much must be loaded: tokens, or 1 for a Mamba
    state. `full_len` tokens have cached full-attention KV, even where windows or states are
    missing.
    """

    device_prefix_len: int
    usable_len: int
    full_len: int
    host_hits: tuple[int, ...]
    device_node: Node
    best_node: Node
    branch_end: int = (
        0  # `full_len`, or with `compat.rules.keeps_for_repeats` that on the device alone
    )
    dropped_len: int = 0  # cached tokens after `full_len` that are computed again for the draft

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
        """Return the length of the cached full-attention KV if a request cannot resume there yet.

        The length is in prompt tokens. A window or Mamba state saved there would help later
        requests. Return None if the request can resume after all cached KV.
        """
        end = min(self.full_len, self.branch_end)
        return end if end > self.usable_len else None
