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
    """Tokens of full KV and of window KV, and states, that a cache holds."""

    device: int
    host: int
    swa_device: int = 0
    swa_host: int = 0
    states_device: int = 0
    states_host: int = 0


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
    window_len: int = 0  # 0: no sliding window
    swa_tokens: int = 0  # on the device; on the host as many times more as of full KV
    num_states: int = 0  # on the device; 0: no recurrent layers

    @property
    def host_ratio(self) -> float:
        """How many times larger the host's pools are than the device's."""
        return self.host_tokens / self.device_tokens


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
