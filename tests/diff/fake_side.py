"""A side to test with: one tier of whole pages, the page used longest ago goes first."""

from collections import Counter
from sys import stdout

from experiments.diff.counting import joined
from experiments.diff.protocol import Hits, Outcome, Pools, SideError, Span, Tokens


class FakeSide:
    """Options: `pages` there is room for; `fail_at` and `crash_at`, requests; `says`."""

    def __init__(self, pools: Pools, options: dict[str, str]) -> None:
        if "will_not_open" in options:
            raise SideError("it will not open")
        self._page = pools.page_size
        self._room = int(options.get("pages", "1000"))
        self._options = options
        self._held: dict[bytes, None] = {}  # the page used longest ago first
        self._finished: list[int] = []

    def about(self) -> dict[str, str]:
        stdout.write("something for the log\n")
        return {"engine": "fake", "version": self._options.get("version", "1")}

    def admit(self, number: int, tokens: Tokens, prompt_len: int) -> Outcome:
        if str(number) == self._options.get("fail_at"):
            raise SideError("no room is left")
        if str(number) == self._options.get("crash_at"):
            raise RuntimeError("boom\nand more")
        keys = self._keys(tokens[: prompt_len - 1])
        hits = 0
        for key in keys:
            if key not in self._held:
                break
            hits += self._page
        counts: Counter[str] = Counter()
        for key in reversed(keys):  # the beginning is used last, as below a tree's nodes
            self._held.pop(key, None)
            self._held[key] = None
        while len(self._held) > self._room:
            del self._held[next(iter(self._held))]
            counts["evicted/full/device"] += self._page
        return Outcome(
            hits=Hits(hits, 0, 0),
            counts=dict(counts),
            held={"full/device": len(self._held) * self._page},
            admission=self._options.get("says"),
        )

    def finish(self, number: int) -> None:
        self._finished.append(number)

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        keys = enumerate(self._keys(tokens))
        pages = [(place, place + 1) for place, key in keys if key in self._held]
        return {"full/device": joined(pages, self._page, "full")} if pages else {}

    def close(self) -> None:
        stdout.write(f"finished {self._finished}\n")
        stdout.flush()

    def _keys(self, tokens: Tokens) -> list[bytes]:
        page = self._page
        return [tokens[:end].tobytes() for end in range(page, len(tokens) + 1, page)]


open_side = FakeSide
