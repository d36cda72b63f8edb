"""What one request holds of the cache while it runs."""

from hicache.cache.pages import PageIds
from hicache.cache.tree.node import Lock
from hicache.request import Request


class Sequence:
    """The tokens of a request and the device pages and slots under them.

    `pages`, by kind once it is acquired: page ids of `[0, num_pages)`. `[0, tree_pages)` belong to
    the tree and are locked through `lock`; the request owns `[max(starts[kind], tree_pages),
    num_pages)`. Pages of a window before its start are freed, or were never the request's, and
    their ids mean nothing. `states` are checkpoints it has captured and not published: page
    boundary → slot. `digests` are the page digests of `[digests_start, ...)`, as far as storage has
    asked for them.
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
        self.spare_slots: PageIds | None = None  # held and never used
        self.states: dict[int, PageIds] = {}
        self.digests: list[bytes] = []
        self.digests_start = 0

    @property
    def request_id(self) -> int | None:
        """The id of the request; None without one."""
        return None if self.request is None else self.request.id

    def known_digests(self, start: int, end: int) -> list[bytes] | None:
        """The digests of pages `[start, end)`, if all of them are known."""
        first = start - self.digests_start
        if first < 0 or end - self.digests_start > len(self.digests):
            return None
        return self.digests[first : end - self.digests_start]
