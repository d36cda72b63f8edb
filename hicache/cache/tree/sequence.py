"""What one request holds of the cache while it runs."""

from hicache.cache.kinds import Kinds
from hicache.cache.pages import PageIds
from hicache.cache.tree.node import Lock
from hicache.request import Request


class Sequence:
    """The tokens of a request, and its device pages and slots.

    `pages` holds, by kind, the page ids of `[0, num_pages)` after the request was admitted. The
    tree owns `[0, tree_pages)`, which `lock` protects. The request owns `[max(starts[kind],
    tree_pages), num_pages)`, and of a kind that the tree does not keep `[starts[kind],
    num_pages)`. Ids of window pages before `starts[kind]` are invalid: these pages were freed, or
    the request never had them. `states` maps page boundaries to the slots of
    unpublished checkpoints. `digests` are the page digests from page `digests_start` on, as far as
    storage needed them.
    """

    def __init__(self, tokens: bytes, namespace: str = "", request: Request | None = None) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.request = request  # for listeners and policies
        self.pages: list[PageIds] = []
        self.starts: list[int] = []
        self.num_pages = 0
        self.tree_pages = 0
        self.lock: Lock | None = None
        self.working_slot: PageIds | None = None
        self.boundary_slot: PageIds | None = None
        self.spare_slots: PageIds | None = None  # allocated, but never used
        self.states: dict[int, PageIds] = {}
        self.digests: list[bytes] = []
        self.digests_start = 0

    def own_start(self, kind: int, kinds: Kinds) -> int:
        """The first page of a kind that the request owns."""
        first = self.starts[kind]
        return max(first, self.tree_pages) if kind in kinds.kept else first

    @property
    def request_id(self) -> int | None:
        return None if self.request is None else self.request.id

    def known_digests(self, start: int, end: int) -> list[bytes] | None:
        first = start - self.digests_start
        if first < 0 or end - self.digests_start > len(self.digests):
            return None
        return self.digests[first : end - self.digests_start]
