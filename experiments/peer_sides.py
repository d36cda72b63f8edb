"""What two caches that are compared request by request have in common."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Hits(NamedTuple):
    """Prompt tokens of one request by where they were found."""

    device: int
    host: int
    storage: int


class Residency(NamedTuple):
    """Tokens of full KV that a cache holds."""

    device: int
    host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Room on each tier; storage, if there is any, never fills."""

    page_size: int
    device_tokens: int
    host_tokens: int
    has_storage: bool
    num_running: int
    max_len: int
    spare_page: bool = True  # the peer's allocation asks eviction for a page more than it takes


class Side(Protocol):
    """One of the two."""

    def admit(self, number: int, tokens: NDArray[np.int32], prompt_len: int) -> Hits:
        """A request comes, is admitted at once and prefilled."""
        ...

    def finish(self, number: int) -> None:
        """Its answer is complete."""
        ...

    def residency(self) -> Residency:
        """What is held now."""
        ...

    def close(self) -> None:
        """Stop whatever runs beside."""
        ...
