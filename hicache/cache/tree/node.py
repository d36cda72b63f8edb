"""One edge of the radix tree and what is kept of its tokens; a lock on it; a match up to it.

Tiers are small integers here, as kinds are, because both index lists on the hottest paths.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hicache.cache.kinds import FULL, KEY_TAGS, KIND_NAMES, MAMBA, SWA
from hicache.cache.pages import PageIds

DEVICE = 0
HOST = 1
TIERS = (DEVICE, HOST)
TIER_NAMES = ("device", "host")
NO_ENTRIES: dict[int, Any] = {}  # not to be written


class Node:
    """The pages `[start, end)` of every sequence that passes through here.

    `held[tier][kind]` are the page ids (one per page; of a point: one slot, the state after the
    last token) or None. A node whose value is None while the node stays is a *tombstone* of that
    kind. `locks[tier][kind]` forbid eviction there; of full on the device, which is locked by whole
    paths, it is `path_locks` that does: the locks that end here, and one for each child that is
    locked.

    A split keeps this object as the lower half, so whoever remembers a node by its end may go on
    doing so.
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
        self.tick = 0  # when it was last touched
        self.aux_ticks = [0] * num_kinds  # when its data of a window or point last ended a match
        self.created = 0  # its number, in the order in which nodes grew; both halves keep it
        self.digests: list[bytes] | None = None  # one a page, once storage needed them
        self.stored = [False] * num_kinds  # by kind: storage was given it, or had it
        self.seed: bytes | None = None  # roots only: what the chain of digests starts from
        self.entries = NO_ENTRIES  # by kind: the `Entry` that a policy of the user's own sees

    @property
    def num_pages(self) -> int:
        """Pages of this node alone."""
        return self.end - self.start

    @property
    def uses(self) -> int:
        """How often a request started from it, or computed it and inserted it."""
        return self.hit_count

    @property
    def is_root(self) -> bool:
        """Whether this is where a namespace begins."""
        return self.parent is None

    def path(self, start: int = 0) -> Iterator["Node"]:
        """This node and those above it up to the one that holds page `start`, from the bottom."""
        node = self
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    def span(self, start: int = 0) -> list["Node"]:
        """The nodes of pages `[start, end)`, from the top; `start` was once a node's start."""
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
    """What one lock forbids the eviction of, and what its release must undo.

    `starts`: (kind, first page) of what it covers up to `node.end`, from the start of a node of the
    path on; of a point, only the node's own slot. A lock on the device covers the whole path and
    the point besides, and `starts` has its windows alone.
    """

    tier: int
    node: Node
    starts: Sequence[tuple[int, int]]


class MatchResult(NamedTuple):
    """The longest reusable start of a request, in tokens, found twice: on the device, anywhere.

    `host_hits`: by kind, what only the host holds of what a hit needs: full tokens between the two
    boundaries, tokens of the window before the any-tier boundary (by page, at most a page-rounded
    window), 1 if the state at that boundary. `full_len`: matched tokens whatever the other kinds
    hold.
    """

    device_prefix_len: int
    usable_len: int
    full_len: int
    host_hits: tuple[int, ...]
    device_node: Node
    best_node: Node

    @property
    def host_hit_length(self) -> int:
        """Full tokens that must be loaded back."""
        return self.host_hits[FULL]

    @property
    def swa_host_hit_length(self) -> int:
        """Tokens of the sliding window that must be loaded back."""
        return self.host_hits[SWA]

    @property
    def mamba_host_hit_length(self) -> int:
        """1 if the state must be loaded back, otherwise 0."""
        return self.host_hits[MAMBA]

    @property
    def needs_sidecars(self) -> bool:
        """Whether a window or a state must be loaded back."""
        return any(self.host_hits[FULL + 1 :])

    @property
    def needs_host_load_back(self) -> bool:
        """Whether using the any-tier boundary takes a copy from the host."""
        return any(self.host_hits)

    def without_host(self) -> "MatchResult":
        """What is left of the match when nothing is loaded back; it has no branch."""
        return self._replace(
            usable_len=self.device_prefix_len,
            full_len=self.device_prefix_len,
            host_hits=(0,) * len(self.host_hits),
            best_node=self.device_node,
        )

    def without_hit(self) -> "MatchResult":
        """The match of a request that uses nothing of what it found."""
        root = self.device_node
        while root.parent is not None:
            root = root.parent
        return self.without_host()._replace(
            device_prefix_len=0, usable_len=0, full_len=0, device_node=root, best_node=root
        )

    @property
    def branch_len(self) -> int | None:
        """Where a state kept now would let the next such request start later than this one."""
        return self.full_len if self.full_len > self.usable_len else None
