"""Whose pages are whose: what the bytes of a stored page follow from, besides its tokens.

Two runs may share a store if they would put the same bytes under the same key. So everything about
a model counts, a field that is new tomorrow among it, unless it stands in `NEUTRAL`.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from hicache.models import ModelConfig

# raise it when a model computes something else, or when items come to lie in another order
PAGE_VERSION = 1

# fields of a model that say how much is kept and where, and nothing about what is in it
NEUTRAL = (
    "source",
    "from_hf",  # where a shape was read; the shape itself counts
    "max_len",
    "default_tp",  # the number of ranks that there are is told apart
    "swa_device_share",
    "swa_host_share",
    "mamba_device_share",
    "mamba_host_share",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOrigin:
    """Where the pages of one rank come from."""

    model: ModelConfig
    page_size: int
    rank: int
    tp: int
    weights: str  # what drew them, and from which seed
    arithmetic: str  # what computes: another machine rounds otherwise
    layout: tuple[str, ...]  # the pieces of an item in their order, with dtype and shape

    @property
    def namespace(self) -> str:
        """The name under which storage keeps these pages and no others."""
        facts = asdict(self)
        for name in NEUTRAL:
            del facts["model"][name]
        text = json.dumps([PAGE_VERSION, facts], sort_keys=True)
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{self.model.name}-p{self.page_size}-rank{self.rank}of{self.tp}-{digest}"
