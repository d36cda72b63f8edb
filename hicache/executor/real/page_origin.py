"""The origin of stored pages: everything besides tokens that determines their bytes.

Two runs may share a store if they write equal bytes under equal keys. So all fields of a model
count, including fields added later, unless `NEUTRAL` lists them.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from hicache.models import ModelConfig

# increase it when a model's results or the order of an item's pieces change
PAGE_VERSION = 1

# model fields that affect how much is kept and where, but not the bytes
NEUTRAL = (
    "source",
    "from_hf",  # the source of a shape; the shape itself counts
    "max_len",
    "default_tp",  # the actual number of ranks is a separate field
    "swa_device_share",
    "swa_host_share",
    "mamba_device_share",
    "mamba_host_share",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOrigin:
    """What determines the bytes of one tensor-parallel rank's KV pages, besides the tokens.

    Two runs may share stored pages if their origins are equal.
    """

    model: ModelConfig
    page_size: int
    rank: int
    tp: int
    weights: str  # their generator and seed
    arithmetic: str  # hardware and libraries, which determine rounding
    layout: tuple[str, ...]  # the pieces of an item in their order, with dtype and shape

    @property
    def namespace(self) -> str:
        facts = asdict(self)
        for name in NEUTRAL:
            del facts["model"][name]
        text = json.dumps([PAGE_VERSION, facts], sort_keys=True)
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{self.model.name}-p{self.page_size}-rank{self.rank}of{self.tp}-{digest}"
