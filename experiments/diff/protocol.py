"""What two caches that are compared have in common: the questions, the answers, the wire.

One *side* is one process with an environment of its own. It is given pools and options and answers
with what it says about itself; then it is given a list of calls of its methods at a time,

    [("finish", 3), ("admit", 7, tokens, prompt_len)], or [("probe", tokens)]

and answers with what the last of them has returned, or with a `SideError`, which ends it; an empty
list ends it too. All of it goes through a pipe as Python's own objects; what the engine writes goes
to its log.

To add an engine: a module with `open_side(pools, options) -> Side` that runs in the environment
that `experiments.diff.engines` describes, and a line there. All lengths are tokens, states are
counted one by one, and a name such as `swa/host` says component and tier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

COMPONENTS = ("full", "swa", "mamba")
TIERS = ("device", "host", "storage")
# copies, by where from and where to
MOVES = ("back_up", "load_back", "write", "read")
Tokens = NDArray[np.int32]
Span = tuple[int, int]
Call = tuple[object, ...]  # a method of `Side` and its arguments


class SideError(Exception):
    """A side cannot go on; one sentence says why."""


class Hits(NamedTuple):
    """Prompt tokens of one request by where they were found."""

    device: int
    host: int
    storage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Room on each tier; storage, if there is any, never fills."""

    page_size: int = 64
    device_tokens: int
    host_tokens: int  # 0: neither host nor storage
    has_storage: bool = True
    num_running: int = 4  # requests that hold their pages at any time
    max_len: int  # tokens of the longest request
    window_len: int = 0  # 0: no sliding window
    swa_tokens: int = 0  # on the device; on the host as many times more as of full KV
    num_states: int = 0  # on the device; 0: no recurrent layers
    copy_delay: int = 0  # requests that come before a back-up is done; 0: it is done at once
    # some requests are aborted as soon as they are matched, and some run three times as long
    is_eventful: bool = False

    @property
    def host_ratio(self) -> float:
        """How many times larger the host's pools are than the device's."""
        return self.host_tokens / self.device_tokens

    @property
    def components(self) -> tuple[str, ...]:
        """What the model keeps."""
        there = (True, self.window_len > 0, self.num_states > 0)
        return tuple(name for name, is_there in zip(COMPONENTS, there, strict=True) if is_there)

    def unit(self, component: str) -> int:
        """Tokens of a page, or one state."""
        return 1 if component == "mamba" else self.page_size

    def too_small(self, num_tokens: int) -> SideError:
        """What to raise where so many tokens of one request find no room on the device."""
        sizes = [f"{self.device_tokens:,} tokens"]
        sizes += [f"{self.swa_tokens:,} tokens of windows"] if self.window_len else []
        sizes += [f"{self.num_states} states"] if self.num_states else []
        held = f"and what {self.num_running - 1} others hold"
        if self.copy_delay:
            held += f" or back-ups of {self.copy_delay} requests lock"
        return SideError(
            f"the device pools are too small: {num_tokens:,} tokens of one request {held} do not"
            f" fit {', '.join(sizes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one request found, and what the cache did since the answer before.

    Attributes:
        counts: `hit/swa/host` of this request's window or state; `moved/full/read` and
            `evicted/mamba/device` since the answer before.
        held: what each tier holds now, by `full/device`.
        admission: what the engine's own admission said of it, in its words; None: it was not asked.
        state: what else a side can say of its cache now, compared where both sides say it:
            `locked/full/device`, tokens or states of all nodes, each times the locks it has;
            `free/full/device`, what the allocator has left; `pages/full/device`, the sum of the
            names of the pages held (`experiments.diff.pages`), modulo 2**64.
    """

    hits: Hits
    counts: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    admission: str | None = None
    state: Mapping[str, int] = field(default_factory=dict)


class Side(Protocol):
    """One of the two caches."""

    def about(self) -> dict[str, str]:
        """Version and the like, for the report."""
        ...

    def admit(self, number: int, tokens: Tokens, prompt_len: int) -> Outcome:
        """A request comes, is admitted at once and prefilled."""
        ...

    def match(self, tokens: Tokens) -> None:
        """A prompt comes, is matched and aborted; only of sides whose `about` has `matches`."""
        ...

    def finish(self, number: int) -> None:
        """Its answer is complete."""
        ...

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        """Which `[start, end)` of these tokens are held, by `full/device`; changes nothing.

        A state is the span `(end - 1, end)` of the last token it has read.
        """
        ...

    def contents(self) -> dict[str, list[int]]:
        """Names of all pages held, by `full/device`; only of sides whose state has `pages/...`."""
        ...

    def close(self) -> None:
        """Stop the threads that the engine started."""
        ...
