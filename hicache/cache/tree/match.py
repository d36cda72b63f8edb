"""What a look into the tree finds."""

from typing import NamedTuple

from hicache.cache.tree.node import Node


class MatchResult(NamedTuple):
    """The longest reusable start of a request, in tokens, found twice: on the device, anywhere.

    `host_hit_length`: full tokens held only on the host between the two boundaries.
    `swa_host_hit_length`: tokens held only on the host in the window before the any-tier boundary,
    by page, at most a page-rounded window. `mamba_host_hit_length`: 1 if the state at that boundary
    is only on the host. `full_len`: matched tokens whatever the other components hold.
    `found_len`: the usable ones before any of them were given up.
    """

    device_prefix_len: int
    usable_len: int
    full_len: int
    found_len: int
    host_hit_length: int
    swa_host_hit_length: int
    mamba_host_hit_length: int
    device_node: Node
    best_node: Node

    @property
    def needs_host_load_back(self) -> bool:
        """Whether using the any-tier boundary takes a copy from the host."""
        return bool(self.host_hit_length or self.swa_host_hit_length or self.mamba_host_hit_length)

    def without_host(self) -> "MatchResult":
        """What is left of the match when nothing is loaded back."""
        return self._replace(
            usable_len=self.device_prefix_len,
            host_hit_length=0,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
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
