"""One edge of the radix tree, and what is kept of its tokens.

Components and tiers are small integers here, because they index lists on the hottest paths. Tiers
are final, so that a compiler knows them; components are not, because mypy would take what
`held[tier][kind]` once was for what it is after a change, and leave out looking.
"""

from collections.abc import Iterator
from typing import Final

from hicache.cache.pages import PageIds
from hicache.cache.tree.page_registry import NO_NUMBERS, PageNumbers
from hicache.models import ComponentKind

FULL, SWA, MAMBA = 0, 1, 2
KINDS = (FULL, SWA, MAMBA)
KIND_OF = {ComponentKind.full: FULL, ComponentKind.swa: SWA, ComponentKind.mamba: MAMBA}
KIND_NAMES = ("full", "swa", "mamba")
DEVICE: Final = 0
HOST: Final = 1
TIERS = (DEVICE, HOST)
TIER_NAMES = ("device", "host")


class Node:
    """The pages `[start, end)` of every sequence that passes through here.

    `held[tier][kind]` are the page ids (full and swa: one per page; mamba: one slot, the state
    after the last token) or None. A node whose value is None while the node stays is a
    *tombstone* of that component. `locks[tier][kind]` forbid eviction there; of full on the device,
    which is locked by whole paths, it is `path_locks` that does: the locks that end here, and one
    for each child that is locked.

    A split keeps this object as the lower half, so whoever remembers a node by its end may go on
    doing so.
    """

    __slots__ = (
        "aux_ticks",
        "children",
        "created",
        "digests",
        "edge",
        "end",
        "held",
        "hit_count",
        "locks",
        "num_device_children",
        "numbers",
        "parent",
        "path_locks",
        "seed",
        "start",
        "stored",
        "tick",
    )

    def __init__(self, parent: "Node | None", edge: bytes, start: int, num_pages: int) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.end = start + num_pages
        self.children: dict[bytes, Node] = {}
        self.held: tuple[list[PageIds | None], list[PageIds | None]] = (
            [None, None, None],
            [None, None, None],
        )
        self.locks = ([0, 0, 0], [0, 0, 0])
        self.path_locks = 0
        self.num_device_children = 0  # children with full on the device
        self.hit_count = 0
        self.tick = 0  # when it was last touched
        self.aux_ticks = [0, 0, 0]  # when its swa window or mamba state last ended a match
        self.created = 0  # its number, in the order in which nodes grew; both halves keep it
        self.digests: list[bytes] | None = None  # one a page, once storage needed them
        self.stored = [False, False, False]  # by component: storage was given it, or had it
        self.numbers = NO_NUMBERS  # of its pages in the registry, if anybody counts
        self.seed: bytes | None = None  # roots only: what the chain of digests starts from

    @property
    def num_pages(self) -> int:
        """Pages of this node alone."""
        return self.end - self.start

    @property
    def is_root(self) -> bool:
        """Whether this is where a namespace begins."""
        return self.parent is None

    def is_locked(self, tier: int, kind: int) -> bool:
        """Whether a component may not be evicted from a tier."""
        locks = self.path_locks if tier == DEVICE and kind == FULL else self.locks[tier][kind]
        return locks > 0

    def path(self, start: int = 0) -> Iterator["Node"]:
        """This node and those above it up to the one that holds page `start`, from the bottom."""
        node = self
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    def span(self, start: int = 0) -> list["Node"]:
        """The nodes of pages `[start, end)`, from the top; `start` was once a node's start."""
        return list(self.path(start))[::-1]

    def numbers_of(self, kind: int) -> PageNumbers:
        """The numbers of the pages of one component; a state's is that of the page before it."""
        return self.numbers[-1:] if kind == MAMBA else self.numbers

    def __repr__(self) -> str:
        tiers = "/".join(
            "".join(
                name[0]
                for name, held in zip(KIND_NAMES, self.held[tier], strict=True)
                if held is not None
            )
            or "-"
            for tier in TIERS
        )
        locks = f"{self.path_locks} {self.locks}"
        return f"<Node pages [{self.start}, {self.end}) {tiers} locks {locks}>"
