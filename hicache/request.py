"""A request: a prompt, and the answer that the engine will produce.

Tokens are stored as runs of consecutive ids, because traces name blocks of ids. A prompt of 100,000
tokens has about two hundred runs until the engine needs its bytes.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4  # a token id is a little-endian int32


@dataclass(slots=True)
class TokenSpans:
    """A sequence of token ids, as runs of consecutive ids.

    `starts`: [K] int32, first id of each run. `counts`: [K] int32, each at least 1. `len()` counts
    tokens, not runs.
    """

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    _len: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._len = sum(self.counts.tolist())

    def __len__(self) -> int:
        return self._len

    def to_bytes(self) -> bytes:
        """The ids as packed little-endian int32, `4 * len(self)` bytes. O(tokens)."""
        # an arange per run takes a third of the time of gathering all ids at once
        return b"".join(
            np.arange(start, start + count, dtype="<i4").data
            for start, count in zip(self.starts.tolist(), self.counts.tolist(), strict=True)
        )


EMPTY_SPANS = TokenSpans(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt, and the answer that the trace recorded for it.

    `output` holds the ids of the answer. A replay knows them beforehand and inserts them in the
    cache as they are decoded. `session_id` derives from the session's first request, so it is the
    same under every seed. Ids are in order of arrival. `arrival_ns` is the time in the trace. Under
    causal and closed arrivals, a request with a `parent_id` waits for that request's answer and for
    the answers of `joins`, the last requests of its finished sub-agents. Under closed arrivals it
    also waits for `think_ns` after the last of these answers.
    """

    id: int
    session_id: int
    arrival_ns: int
    prompt: TokenSpans
    output: TokenSpans
    parent_id: int | None = None
    joins: tuple[int, ...] = ()  # further requests whose answers it waits for
    think_ns: int = 0
    stop_reason: str = ""
    namespace: str = ""  # LoRA adapter or tenant salt: equal tokens of two namespaces never match
    prompt_len: int = field(init=False)
    output_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt)
        self.output_len = len(self.output)
        if self.prompt_len < 1:
            raise ValueError(f"request {self.id} has an empty prompt")
        if self.output_len < 1:
            raise ValueError(f"request {self.id} has an empty answer")
