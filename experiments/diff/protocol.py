"""Interface between a comparison and its two caches: questions, answers, wire format.

One *side* is one process with its own environment. It receives pools and options and answers with a
description of itself. Then it receives lists of calls of its methods, such as

    [("finish", 3), ("admit", 7, tokens, prompt_len)], or [("probe", tokens)]

and answers each list with the result of its last call, or with a `SideError`, which ends the
process. An empty list ends it too; the last answer is its peak memory in bytes. Messages are pickled objects on a pipe; the engine's own output
goes to the side's log.

To add an engine, write a module with `open_side(pools, options) -> Side` that runs in the
environment of `experiments.diff.engines`, and add it there. Lengths are tokens, states are counted
one by one, and a name such as `swa/host` gives component and tier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

COMPONENTS = ("full", "swa", "mamba")
TIERS = ("device", "host", "storage")
# where a request is aborted: before storage has answered what it holds, before the pages are read,
# after the first chunk of the prompt, in the middle of the answer
STAGES = ("queued", "prefetching", "chunk", "decoding")
# copies, by source and target
MOVES = ("back_up", "load_back", "write", "read")
Tokens = NDArray[np.int32]
Span = tuple[int, int]
Call = tuple[object, ...]  # a method of `Side` and its arguments
Arrival = tuple[int, Tokens, int]  # number, tokens and prompt length of a request
StepRow = dict[str, Any]  # what one step did; see `Side.step`


class SideError(Exception):
    """Raised when a compared cache cannot start or continue; the message gives the reason."""


class Hits(NamedTuple):
    device: int
    host: int
    storage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Sizes of the memory pools of a compared cache, and how its requests run.

    A storage tier, if there is one, has unlimited capacity.
    """

    page_size: int = 64
    device_tokens: int
    host_tokens: int  # 0 means neither host nor storage
    has_storage: bool = True
    num_running: int = 4  # requests that hold their pages at any time
    chunk_tokens: int = 8192  # of a prompt that are computed at once; a multiple of `page_size`
    max_len: int  # tokens of the longest request
    window_len: int = 0  # 0 means no sliding window
    swa_tokens: int = 0  # on the device; the host has `host_ratio` times as many
    num_states: int = 0  # on the device; 0 means no recurrent layers
    copy_delay: int = 0  # requests that arrive before a back-up is done; 0 means at once
    # requests in flight in a comparison of steps; 0 means that requests are compared one at a time
    in_flight: int = 0
    max_running: int = 256  # requests in one step, where several are in flight
    is_eventful: bool = False  # some requests run three times as long
    abort_seed: int = 0  # draws a third of the requests, and a stage at which each is aborted

    @property
    def host_ratio(self) -> float:
        return self.host_tokens / self.device_tokens

    @property
    def components(self) -> tuple[str, ...]:
        there = (True, self.window_len > 0, self.num_states > 0)
        return tuple(name for name, is_there in zip(COMPONENTS, there, strict=True) if is_there)

    def unit(self, component: str) -> int:
        return 1 if component == "mamba" else self.page_size

    def too_small(self, num_tokens: int) -> SideError:
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
    """The answer of a compared cache to one request.

    In names such as `full/device`, the first word is the kind of KV cache: `full` (full attention),
    `swa` (sliding window) or `mamba` (Mamba states). The second word is a tier.

    Attributes:
        hits: hit tokens of full-attention KV, by tier.
        counts: copies and evictions since the previous answer, such as `moved/full/read` and
            `evicted/mamba/device`. A name such as `hit/swa/host` counts hits of this request.
        held: tokens, or Mamba states, that the cache holds now, by kind and tier.
        admission: the scheduler's decision in words. None means that the scheduler was not asked.
        state: further numbers by kind and tier. `locked/...` is the sum of tokens times locks over
            all tree nodes. `free/...` is free space. `pages/...` is a checksum of all pages held.
    """

    hits: Hits
    counts: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    admission: str | None = None
    state: Mapping[str, int] = field(default_factory=dict)


class Side(Protocol):
    def about(self) -> dict[str, str]: ...

    def admit(self, number: int, tokens: Tokens, prompt_len: int, stage: str = "") -> Outcome:
        """Admit a request and prefill its prompt; return cache hits and other counts.

        The prompt is the first `prompt_len` tokens. The rest of `tokens` is the answer. `number`
        identifies the request until it is finished. With one of the first three `STAGES`, the
        request is aborted there. Pages read for it do not count. A cache that takes a `stage` has a
        key `aborts` in the result of `about()`, and a method `abort`.
        """

    def abort(self, number: int) -> None:
        """Decode half of a request's answer, and abort the request."""

    def finish(self, number: int) -> None:
        """Decode the rest of a request's answer, and release the request's pages.

        `number` is the number that the request was admitted with.
        """

    def step(self, arrivals: list[Arrival]) -> StepRow:
        """Queue the requests that arrive, run one step, and return what it did.

        The method is optional; it is called instead of `admit` and `finish` if `pools.in_flight` is
        not 0. Keys of the result, of which a side leaves out those that it cannot give:

        - `step`: number of the step, from 1; `budget`: tokens of prompts that it may compute.
        - `extend`: [id, start, end] of each prompt that it computes, in order; `decode`: ids of the
          requests that decode.
        - `loading`: ids of requests that begin to load from the host, and compute later.
        - `preempted`: ids of the requests that go back to the queue.
        - `hit`: tokens hit on the device and below it, by id of the requests that first start.
        - `deferred`: [id, reason] of the first request that waits on, if there is one.
        - `finished`: ids of the requests that end with this step.
        - `free`: pages of full KV that are free or can be evicted after the step.
        - `pools`: free tokens (or states) of each device pool.
        - `held`, `moved`: as `held` and `counts` of `Outcome`.
        """

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        """Return the ranges of these tokens that the cache holds, without changing the cache.

        Ranges are grouped by kind and tier, such as `full/device`, and exclude their end. A Mamba
        state counts as the range of the last token that it has read.
        """

    def close(self) -> None: ...
