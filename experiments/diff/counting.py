"""Counters of both sides, so that equal numbers have equal meaning."""

from collections import Counter

from experiments.diff.protocol import Hits, Outcome, Pools, Span


def admission_word(chunk_tokens: int | None, asked_tokens: int) -> str:
    """Name the decision of admission.

    `chunk_tokens`: how many of the `asked_tokens` the first step may compute; None means that the
    request is deferred.
    """
    if chunk_tokens is None:
        return "deferred"
    return "admitted" if chunk_tokens >= asked_tokens else "admitted, its chunk cut to the room"


class Tally:
    """Counts of events since the last answer."""

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
        """Return the answer for one request, and reset the counts.

        Args:
            hits: of full KV.
            held: what each tier holds now.
            swa_loaded: tokens of its window that only the host held.
            states_loaded: 1 if only the host held its state.
            admission: see `Outcome`.
            state: see `Outcome`; None means that the side reports none.
        """
        pools, usable = self._pools, sum(hits)
        page = pools.page_size
        if pools.window_len and usable:
            window = min(-(-pools.window_len // page) * page, usable)
            self._split("swa", window, swa_loaded)
        if pools.num_states and usable:
            self._split("mamba", 1, states_loaded)
        counts = {name: amount for name, amount in sorted(self._counts.items()) if amount}
        self._counts.clear()
        return Outcome(hits=hits, counts=counts, held=held, admission=admission, state=state or {})

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
    """Convert spans of pages to spans of tokens, with adjacent ones joined.

    For `mamba/...`, return the last token of each span.
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
