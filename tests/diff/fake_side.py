"""A fake side (engine to compare): one tier of whole pages with LRU eviction."""

from collections import Counter
from sys import stdout

from experiments.diff.counting import joined
from experiments.diff.pages import page_names
from experiments.diff.protocol import Hits, Outcome, Pools, SideError, Span, Tokens


class FakeSide:
    """A cache of one tier.

    Options: `pages` is its capacity. `fail_at`, `crash_at`, `leak_at` (the lock is not released)
    and `other_at` (the oldest page is replaced) are the request at which it does something wrong.
    `says` is its admission. With `aborts` it accepts requests that are aborted; with `silent` it
    reports no state. It takes and frees `megabytes` when it opens.
    """

    def __init__(self, pools: Pools, options: dict[str, str]) -> None:
        if "will_not_open" in options:
            raise SideError("it will not open")
        bytearray(int(options.get("megabytes", "0")) * 1_000_000)
        self._page = pools.page_size
        self._room = int(options.get("pages", "1000"))
        self._options = options
        self._held: dict[int, None] = {}  # names of pages, the one used longest ago first
        self._running: dict[int, int] = {}  # tokens that each request locks
        self._finished: list[int] = []

    def about(self) -> dict[str, str]:
        stdout.write("something for the log\n")
        about = {"engine": "fake", "version": self._options.get("version", "1")}
        return about | ({"aborts": "yes"} if "aborts" in self._options else {})

    def admit(self, number: int, tokens: Tokens, prompt_len: int, stage: str = "") -> Outcome:
        if str(number) == self._options.get("fail_at"):
            raise SideError("no room is left")
        if str(number) == self._options.get("crash_at"):
            raise RuntimeError("boom\nand more")
        keys = page_names(tokens[: prompt_len - 1], self._page)
        hits = self._hits(keys) * self._page
        counts: Counter[str] = Counter()
        self._use(keys)
        while len(self._held) > self._room:
            del self._held[next(iter(self._held))]
            counts["evicted/full/device"] += self._page
        if str(number) == self._options.get("other_at"):
            del self._held[next(iter(self._held))]
            self._held[7] = None
        if not stage:
            self._running[number] = len(keys) * self._page
        return Outcome(
            hits=Hits(hits, 0, 0),
            counts=dict(counts),
            held={"full/device": len(self._held) * self._page},
            admission=self._options.get("says"),
            state={} if "silent" in self._options else self._state(),
        )

    def abort(self, number: int) -> None:
        self.finish(number)

    def finish(self, number: int) -> None:
        self._finished.append(number)
        if str(number) != self._options.get("leak_at"):
            del self._running[number]

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        keys = enumerate(page_names(tokens, self._page))
        pages = [(place, place + 1) for place, key in keys if key in self._held]
        return {"full/device": joined(pages, self._page, "full")} if pages else {}

    def close(self) -> None:
        stdout.write(f"finished {self._finished}\n")
        stdout.flush()

    def _hits(self, keys: list[int]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self._held), len(keys))

    def _use(self, keys: list[int]) -> None:
        for key in reversed(keys):  # the beginning is used last, as below a tree's nodes
            self._held.pop(key, None)
            self._held[key] = None

    def _state(self) -> dict[str, int]:
        return {
            "locked/full/device": sum(self._running.values()),
            "free/full/device": 4000 - len(self._held) * self._page,
            "pages/full/device": sum(self._held) % (1 << 64),
        }


open_side = FakeSide
