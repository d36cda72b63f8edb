"""Counters of both sides, so that equal numbers have equal meaning."""

from collections import Counter

from experiments.diff.protocol import Hits, Outcome, Pools, Span


def admission_word(chunk_tokens: int | None, asked_tokens: int) -> str:
    """Return a name for a scheduler's decision whether to admit a request.

    Of the `asked_tokens` to prefill, the first step may compute `chunk_tokens`. None means that the
    request must wait.
    """
    if chunk_tokens is None:
        return "deferred"
    return "admitted" if chunk_tokens >= asked_tokens else "admitted, its chunk cut to the room"


class Tally:
    """Counts copies and evictions of a cache between two requests."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._counts: Counter[str] = Counter()

    def moved(self, component: str, how: str, amount: int) -> None:
        self._counts[f"moved/{component}/{how}"] += amount

    def evicted(self, name: str, amount: int) -> None:
        self._counts[f"evicted/{name}"] += amount

    def outcome(
        self,
        hits: Hits,
        held: dict[str, int],
        *,
        swa_loaded: int,
        states_loaded: int,
        admission: str | None,
        state: dict[str, int] | None = None,
    ) -> Outcome:
        """Return the answer to one request, and set all counts to zero.

        Args:
            hits: hit tokens of full-attention KV, by tier.
            held: tokens, or Mamba states, that the cache holds now, by kind and tier.
            swa_loaded: tokens of the request's sliding window that had to be loaded from the host.
            states_loaded: 1 if the request's Mamba state had to be loaded from the host, else 0.
            admission: the scheduler's decision in words. None means that the scheduler was not
                asked.
            state: further numbers that describe the cache. None means that there are none.
        """
        pools, usable = self._pools, sum(hits)
        page = pools.page_size
        if pools.window_len and usable:
            window = min(-(-pools.window_len // page) * page, usable)
            self._split("swa", window, swa_loaded)
        if pools.num_states and usable:
            self._split("mamba", 1, states_loaded)
        return Outcome(
            hits=hits, counts=self.take(), held=held, admission=admission, state=state or {}
        )

    def take(self) -> dict[str, int]:
        """Return all counts that are not zero, and set them to zero."""
        counts = {name: amount for name, amount in sorted(self._counts.items()) if amount}
        self._counts.clear()
        return counts

    def _split(self, component: str, wanted: int, loaded: int) -> None:
        # tokens that were read for this request and that it uses are storage hits
        loaded = min(loaded, wanted)
        from_storage = min(self._counts[f"moved/{component}/read"], loaded)
        for tier, amount in (
            ("device", wanted - loaded),
            ("host", loaded - from_storage),
            ("storage", from_storage),
        ):
            self._counts[f"hit/{component}/{tier}"] = amount


def joined(pages: list[Span], page_size: int, name: str) -> list[Span]:
    """Convert ranges of pages to ranges of tokens, and join adjacent ranges.

    If `name` begins with `mamba`, each range stands for one Mamba state. The result is then the
    last token of each range.
    """
    if name.startswith("mamba"):
        return [(end * page_size - 1, end * page_size) for _, end in pages]
    spans: list[Span] = []
    for start, end in pages:
        if spans and spans[-1][1] == start * page_size:
            spans[-1] = (spans[-1][0], end * page_size)
        elif end > start:
            spans.append((start * page_size, end * page_size))
    return spans
