"""What a look into the tree finds."""

from typing import NamedTuple

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tree.node import Node


class MatchResult(NamedTuple):
    """The longest reusable start of a request, in tokens, found twice: on the device, anywhere.

    `host_hits`: by kind, what only the host holds of what a hit needs: full tokens between the two
    boundaries, tokens of the window before the any-tier boundary (by page, at most a page-rounded
    window), 1 if the state at that boundary. `full_len`: matched tokens whatever the other kinds
    hold. `found_len`: the usable ones before any of them were dropped.
    """

    device_prefix_len: int
    usable_len: int
    full_len: int
    found_len: int
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
    def needs_host_load_back(self) -> bool:
        """Whether using the any-tier boundary takes a copy from the host."""
        return any(self.host_hits)

    def without_host(self) -> "MatchResult":
        """What is left of the match when nothing is loaded back."""
        return self._replace(
            usable_len=self.device_prefix_len,
            host_hits=(0,) * len(self.host_hits),
            best_node=self.device_node,
        )

    def without_hit(self) -> "MatchResult":
        """The match of a request that uses nothing of what it found."""
        root = self.device_node
        while root.parent is not None:
            root = root.parent
        return self.without_host()._replace(
            device_prefix_len=0, usable_len=0, device_node=root, best_node=root
        )

    @property
    def branch_len(self) -> int | None:
        """Where a state kept now would let the next such request start later than this one."""
        return self.full_len if self.full_len > self.usable_len else None
