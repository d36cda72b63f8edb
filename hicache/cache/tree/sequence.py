"""What one request holds of the cache while it runs."""

from hicache.cache.kinds import FULL, Kinds
from hicache.cache.pages import PageIds
from hicache.cache.tree.node import DEVICE, Lock, Node
from hicache.request import Request


class Sequence:
    """The tokens of a running request, and the device pages and state slots that the request uses.

    `pages` holds the ids of the first `num_pages` pages, by kind of data. The shared radix tree
    owns the first `tree_pages` of them, which `lock` protects from eviction; the request owns the
    others, and sliding windows from page `tree_windows` on. `starts` holds, by kind, the first page
    that is still held: sliding windows drop older pages. `left_page` is the page at which the
    request last freed window pages; `passed` is, by kind, the page up to which it looked for such
    pages. With `compat.rules.trims_leaves`, the request reads the windows of the tree from page
    `reads_from` on, by kind. Those in `leaving`, as (kind, first page, ids), are not for the tree
    and wait until no step reads them; those in `used`, as (kind, first page, end), and states, are
    read or published; `host_tick` is when it first used the host, of which it has used `host_end`
    pages. `past` locks states that the request has passed, but not yet freed. `states` maps page
    boundaries to Mamba state slots that are not in the tree yet. `digests` are
    hashes of pages from page `digests_start` on.
    """

    def __init__(self, tokens: bytes, namespace: str = "", request: Request | None = None) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.request = request  # for listeners and policies
        self.request_id = None if request is None else request.id
        self.pages: list[PageIds] = []
        self.starts: list[int] = []
        self.passed: list[int] = []
        self.num_pages = 0
        self.tree_pages = self.tree_windows = self.inserted_pages = 0
        self.left_page = -1
        self.reads_from: list[int] = []
        self.leaving: list[tuple[int, int, PageIds]] = []
        self.used: list[tuple[int, int, int]] = []
        self.host_tick = self.host_end = 0
        self.lock: Lock | None = None
        self.past: list[Lock] = []
        self.working_slot: PageIds | None = None
        self.boundary_slot: PageIds | None = None
        self.spare_slots: PageIds | None = None  # allocated, but never used
        self.states: dict[int, PageIds] = {}
        self.digests: list[bytes] = []
        self.digests_start = 0

    def begin(self, node: Node, kinds: Kinds) -> None:
        """Hold the device pages of the prefix that ends at `node`."""
        self.tree_pages = self.tree_windows = self.num_pages = node.end
        self.starts, self.left_page = [node.end] * kinds.size, -1
        self.passed = [0] * kinds.size
        self.pages = [[] for _ in range(kinds.size)]
        for above in node.span():
            device = above.held[DEVICE]
            for kind in kinds.paged:
                self.pages[kind] += device[kind] or [-1] * above.num_pages
            above.uses += 1

    def hold_slots(self, slots: PageIds) -> None:
        self.working_slot, self.boundary_slot = slots[:1], slots[1:2]
        self.spare_slots = slots[2:]

    def own_start(self, kind: int, kinds: Kinds) -> int:
        """Return the first page of a kind that the request owns; the tree owns the pages before."""
        first = self.starts[kind]
        if kind == FULL:
            return max(first, self.tree_pages)
        return max(first, self.tree_windows) if kind in kinds.kept else first

    def known_digests(self, start: int, end: int) -> list[bytes] | None:
        first = start - self.digests_start
        if first < 0 or end - self.digests_start > len(self.digests):
            return None
        return self.digests[first : end - self.digests_start]
