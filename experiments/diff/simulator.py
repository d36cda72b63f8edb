"""Our engine, built from a config as for `hicache run`, and driven one request at a time.

Config, cache, scheduler, prefetcher, serving loop and storage script are those of a simulated run.
Two things differ. Running requests decode one at a time (`Decode.only`). The loop runs until no
copy is under way before the next request comes, so that no outcome depends on time.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from os.path import commonprefix

import numpy as np

from experiments.diff.counting import Tally, admission_word, joined
from experiments.diff.pages import NodeView, PageSpan, page_span, state_of
from experiments.diff.protocol import (
    STAGES,
    Arrival,
    Hits,
    Outcome,
    Pools,
    SideError,
    Span,
    StepRow,
    Tokens,
)
from experiments.diff.rooms import MODELS
from experiments.diff.stepping import Stepper
from hicache.cache.kinds import FULL, KIND_NAMES, MAMBA, SWA
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import BackUp, LoadBack, Reported, StorageWrite
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.keys import Key, keys, kinds_of
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES, Node
from hicache.cache.tree.sequence import Sequence
from hicache.clock import NEVER, Clock
from hicache.config import ExperimentConfig
from hicache.engine.loop import Engine, serve
from hicache.engine.ports import Io
from hicache.executor.completions import Delivery
from hicache.executor.simulated.executor import SimulatedIo
from hicache.executor.simulated.links import Links
from hicache.experiment import build
from hicache.request import Request, TokenSpans
from hicache.runs.schema import config_of
from hicache.scheduler.handover import News
from hicache.scheduler.request_state import RequestState
from hicache.workload.feeder import Dropped, Release

SGLANG = "sglang_0_5_23"
INSTANT = 1e30  # bytes per second


class SimulatorSide:
    def __init__(self, pools: Pools, options: Mapping[str, str]) -> None:
        """Start our own simulator with the given pool sizes.

        `options` may contain `compat` (a preset in `conf/compat`), `eviction`, `write_policy`,
        `scheduling` (asynchronous or not), `mixed`, `speculation`, and `settings`: further ones as
        on the command line, separated by spaces.
        """
        self._pools, self._page = pools, pools.page_size
        self._eviction = options.get("eviction", "lru")
        self._write_policy = options.get("write_policy", "write_through")
        self._has_state = options.get("compat", SGLANG) == SGLANG  # vLLM reports none
        try:
            config = config_for(pools, options)
            self.engine, self._runtime = build(config)
        except ValueError as error:
            raise SideError(str(error)) from error
        self.engine.scheduler.decode.only = None if pools.in_flight else ()
        self._cache, self._tree = self.engine.cache, self.engine.cache.tree
        self._tally = Tally(pools)
        io = self._runtime.io
        assert isinstance(io, SimulatedIo)
        # copies take no time, so that they end in the order in which they begin
        io.links = Links(dict.fromkeys(io.links.capacities, INSTANT))
        self._io = CountedIo(io, pools, self._tally)
        self._stepper = Stepper(self.engine, self._runtime, self._io, pools)
        self._check = self._settle if self._has_state and not pools.in_flight else None
        self.engine.check = self._check
        self._evicted: Counter[str] = Counter()
        self._running: dict[int, tuple[RequestState, bool]] = {}
        self._pages_of = cache(
            lambda edge, before: page_span(self._tokens_of(edge), self._page, before)
        )

    def about(self) -> dict[str, str]:
        return {
            "engine": "hicache",
            "version": "this checkout",
            "eviction": self._eviction,
            "write_policy": self._write_policy,
            "aborts": "yes",
        }

    def admit(self, number: int, tokens: Tokens, prompt_len: int, stage: str = "") -> Outcome:
        io, page, scheduler = self._io, self._page, self.engine.scheduler
        io.now, io.load_back = number, None
        # an answer of one token would end with the prefill; `finish` must end it
        is_short = len(tokens) == prompt_len + 1
        answer = np.append(tokens[prompt_len:], np.zeros(int(is_short), np.int32))
        request = request_of(number, tokens[:prompt_len], answer)
        if stage in STAGES[:2]:
            self._abort_waiting(request, stage)
            return self._outcome(Hits(0, 0, 0))
        seen: list[RequestState] = []
        if stage:
            self.engine.check = lambda engine: self._abort_chunk(engine, number, seen)
        self._serve([request], prompt_len)
        self.engine.check = self._check
        req = seen[0] if stage else scheduler.running[-1]
        if not stage:
            self._running[number] = req, is_short
        # one token of a loaded last page is recomputed; vLLM counts the whole page as a hit
        brought = -(-req.cached_len // page) * page - req.ready_len
        # as the peer counts: full pages that the host held, read only for their state or
        # window are hits of the host
        new = 0 if req.prefetch is None else req.prefetch.published_pages * page
        from_storage = min(new, brought)
        computed = prompt_len - req.cached_len
        chunks = -(-computed // self._pools.chunk_tokens)
        is_whole = bool(stage) or req.num_parts == chunks - 1
        return self._outcome(
            Hits(req.ready_len, brought - from_storage, from_storage),
            admission_word(computed if is_whole else 0, computed),
        )

    def abort(self, number: int) -> None:
        req, _ = self._running.pop(number)
        scheduler = self.engine.scheduler
        scheduler.decode.only = _Until(req, (req.remaining_output + 1) // 2)
        self.engine.wake(self._runtime.clock.now())
        self._serve([], req.request.prompt_len + req.request.output_len)
        scheduler.decode.only = ()
        scheduler.abort(number, self._runtime.clock.now())
        self._let_go()

    def _abort_waiting(self, request: Request, stage: str) -> None:
        scheduler, now_ns = self.engine.scheduler, self._runtime.clock.now()
        req = scheduler.submit(request, now_ns)
        if stage == "queued" or req.prefetch is None:
            scheduler.abort(request.id, now_ns)
        else:
            self._io.on_answer = lambda now_ns: self.engine.abort(request.id, now_ns)
        self._let_go()
        self._io.on_answer = None

    def _abort_chunk(self, engine: Engine, number: int, seen: list[RequestState]) -> None:
        # takes effect at the end of the step that computes the first chunk
        self._settle(engine)
        if engine.extending and not seen:
            seen.append(engine.extending[0].req)
            engine.abort(number, self._runtime.clock.now())

    def _settle(self, engine: Engine) -> None:
        # SGLang completes the copies of an eviction before the step, and their writes during it
        if engine.step_end_ns is not None:
            self._stepper.settle()

    def _let_go(self) -> None:
        self.engine.scheduler.ended.take()
        self._deliver_due()  # nothing else may wake the engine
        self.engine.wake(self._runtime.clock.now())
        self._serve([], 0)

    def _deliver_due(self) -> None:
        for done in self._io.due():
            self.engine.deliver(done, self._runtime.clock.now())

    def _outcome(self, hits: Hits, admission: str | None = None) -> Outcome:
        self._count_evictions()
        load_back = self._io.load_back
        loaded: Counter[int] = Counter() if load_back is None else load_back.counts
        return self._tally.outcome(
            hits,
            self._held(),
            swa_loaded=loaded[SWA] * self._page,
            states_loaded=min(loaded[MAMBA], 1),
            admission=admission,
            state=self._state() if self._has_state else None,
        )

    def finish(self, number: int) -> None:
        req, is_short = self._running.pop(number)
        scheduler = self.engine.scheduler
        if is_short:
            scheduler.running.remove(req)
            scheduler.decode.finish(req)
        scheduler.decode.only = {number}
        self.engine.wake(self._runtime.clock.now())
        self._serve([], req.request.prompt_len + req.request.output_len)
        scheduler.decode.only = ()

    def step(self, arrivals: list[Arrival]) -> StepRow:
        self._io.now += 1
        row = self._stepper.step(
            [
                request_of(number, tokens[:prompt_len], tokens[prompt_len:])
                for number, tokens, prompt_len in arrivals
            ]
        )
        self._count_evictions()
        held = Counter(self._held())
        held.subtract(self._stepper.not_yet_held())
        pools = {
            KIND_NAMES[kind]: self._cache.pools[DEVICE][kind].num_free
            * self._pools.unit(KIND_NAMES[kind])
            for kind in self._tree.kinds.numbers
        }
        return row | {"pools": pools, "held": dict(held), "moved": self._tally.take()}

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        size = self._tree.page_bytes
        names = self._tree.names
        assert isinstance(names, Digests)
        text = names.of_tokens(tokens.astype("<i4").tobytes())
        text = text[: len(text) // size * size]
        root = self._tree.root("")
        found: dict[str, list[tuple[int, int]]] = {}
        node: Node | None = root
        while node is not None:
            start = node.end
            node = node.children.get(text[start * size : (start + 1) * size])
            if node is None:
                break
            same = len(commonprefix([text[start * size :], node.edge])) // size  # noqa: RUF071 - bytes
            for tier, name in zip((DEVICE, HOST), TIER_NAMES, strict=True):
                for kind in self._tree.kinds.numbers:
                    is_usable = kind != MAMBA or same == node.num_pages
                    if node.held[tier][kind] is not None and is_usable:
                        span = (start, start + same)
                        found.setdefault(f"{KIND_NAMES[kind]}/{name}", []).append(span)
            if same < node.num_pages:
                break
        digests = names.of_span(root, Sequence(text), len(text) // size)
        for kind in self._tree.kinds.numbers:
            for place, key in enumerate(keys(digests, kind)):
                if key in self._io.stored:
                    name = f"{KIND_NAMES[kind]}/storage"
                    found.setdefault(name, []).append((place, place + 1))
        return {name: joined(spans, self._page, name) for name, spans in found.items()}

    def close(self) -> None:
        self._runtime.close()

    def _tokens_of(self, edge: bytes) -> Tokens:
        # without the tokens of the next page that are part of a page's name
        pages = np.frombuffer(edge, "<i4").reshape(-1, self._page + self._tree.overlap)
        return pages[:, : self._page].reshape(-1)

    def _serve(self, requests: list[Request], num_tokens: int) -> None:
        # runs until nothing is under way; `num_tokens`: tokens of the served request
        watch = _Watch([(self._runtime.clock.now(), each) for each in requests])
        self._deliver_due()
        try:
            serve(
                [self.engine],
                watch,
                clock=self._runtime.clock,
                io=self._io,
                route=lambda request: 0,
                observer=watch,
            )
        except RuntimeError as error:  # the scheduler defers it for ever
            raise self._pools.too_small(num_tokens) from error
        if watch.is_refused or self.engine.scheduler.waiting:
            raise self._pools.too_small(num_tokens)

    def _held(self) -> dict[str, int]:
        resident = self._tree.residency.resident
        held = {}
        for kind in self._tree.kinds.numbers:
            name, unit = KIND_NAMES[kind], self._pools.unit(KIND_NAMES[kind])
            for tier in (DEVICE, HOST)[: 1 + (self._pools.host_tokens > 0)]:
                held[f"{name}/{TIER_NAMES[tier]}"] = resident[tier][kind] * unit
            if self._pools.has_storage:
                held[f"{name}/storage"] = self._io.num_stored[kind] * unit
        return held

    def _state(self) -> dict[str, int]:
        state = state_of(self._nodes(), self._pools)
        for kind in self._tree.kinds.numbers:
            name, pool = KIND_NAMES[kind], self._cache.pools[DEVICE][kind]
            state[f"free/{name}/device"] = pool.num_free * self._pools.unit(name)
            if self._pools.copy_delay:
                # during a back-up, ours also locks the copy on the host; SGLang locks the device
                # alone, because device data does not leave its host
                del state[f"locked/{name}/host"]
        return state

    def _nodes(self) -> Iterator[NodeView]:
        # all nodes below the root, from the top
        found: list[tuple[Node, PageSpan]] = []
        waiting = [(self._tree.root(""), 0)]
        while waiting:
            parent, before = waiting.pop()
            for node in parent.children.values():
                pages = self._pages_of(node.edge, before)
                found.append((node, pages))
                waiting.append((node, pages.last))
        # a node counts the path locks that end there, and one for each child that is locked
        paths: dict[Node, int] = {}
        for node, _ in reversed(found):
            if node.path_locks:
                locked = [child for child in node.children.values() if child.path_locks]
                paths[node] = node.path_locks - len(locked) + sum(paths[each] for each in locked)
        places = [
            (f"{KIND_NAMES[kind]}/{name}", tier, kind)
            for tier, name in zip((DEVICE, HOST), TIER_NAMES, strict=True)
            for kind in self._tree.kinds.numbers
        ]
        for node, pages in found:
            held = [place for place, tier, kind in places if node.held[tier][kind] is not None]
            locks = {
                place: count for place, tier, kind in places if (count := node.locks[tier][kind])
            }
            if node in paths:
                locks["full/device"] = paths[node]
            yield NodeView(pages, held, locks)

    def _count_evictions(self) -> None:
        for tier in TIER_NAMES:
            for kind in self._tree.kinds.numbers:
                name, unit = KIND_NAMES[kind], self._pools.unit(KIND_NAMES[kind])
                total = self._cache.counters[f"evict/{tier}_{name}_pages"] * unit
                self._tally.evicted(f"{name}/{tier}", total - self._evicted[f"{name}/{tier}"])
                self._evicted[f"{name}/{tier}"] = total


class CountedIo:
    """Counts the copies and storage calls of our simulator, and delays the reports of back-ups.

    A back-up counts when it starts. It is reported as complete `pools.copy_delay` requests later.
    """

    def __init__(self, inner: Io, pools: Pools, tally: Tally) -> None:
        self.now = 0  # the number of the current request
        self.load_back: LoadBack | None = None  # of that request
        self.on_answer: Callable[[int], None] | None = None  # called when storage answers
        self.stored: set[Key] = set()
        self.num_stored: Counter[int] = Counter()  # of them, by kind
        self._inner, self._pools, self._tally = inner, pools, tally
        self._late: deque[tuple[int, Reported]] = deque()  # (number of the request then, copy)

    def pass_by(self, limit_ns: int, clock: Clock) -> int:
        return self._inner.pass_by(limit_ns, clock)

    def advance(self, now_ns: int) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for engine, done in self._inner.advance(now_ns):
            if isinstance(done, Prefetch):
                if self.on_answer is not None and not done.is_settled:
                    self.on_answer(now_ns)
                self._count_read(done)
                deliveries.append((engine, done))
                continue
            if isinstance(done, LoadBack):
                self.load_back = done
            assert not isinstance(done, News), "one engine gets no news of others"
            self._count(done)
            if self._pools.copy_delay and isinstance(done, BackUp):
                self._late.append((self.now + self._pools.copy_delay, done))
            else:
                deliveries.append((engine, done))
        return deliveries

    def due(self) -> list[Reported]:
        due: list[Reported] = []
        while self._late and self._late[0][0] <= self.now:
            due.append(self._late.popleft()[1])
        return due

    def _count(self, done: Reported) -> None:
        if isinstance(done, StorageWrite):
            # storage skips keys that it holds
            new = [key for key in done.keys if key not in self.stored]
            self.stored.update(new)
            for kind, count in Counter(kinds_of(new)).items():
                self.num_stored[kind] += count
                self._moved(kind, "write", count)
            return
        how = "back_up" if isinstance(done, BackUp) else "load_back"
        for move in done.moves:
            self._moved(move.kind, how, len(move.sources))

    def _count_read(self, done: Prefetch) -> None:
        if not done.is_read or done.is_settled:
            return
        self._moved(FULL, "read", done.completed_pages)
        end = done.restored_pages
        for kind, window in done.needs:
            self._moved(kind, "read", end - done.first_page(window, end))

    def _moved(self, kind: int, how: str, num_pages: int) -> None:
        name = KIND_NAMES[kind]
        if num_pages:
            self._tally.moved(name, how, num_pages * self._pools.unit(name))


class _Watch:
    # releases some requests, and notes whether one of them was refused

    is_over = False

    def __init__(self, releases: list[Release]) -> None:
        self._releases = releases
        self.is_refused = False

    def initial(self) -> list[Release]:
        return self._releases

    def on_answered(self, request_id: int, now_ns: int) -> list[Release]:
        return []

    def on_dropped(self, request_id: int, now_ns: int) -> Dropped:
        return Dropped([], [])

    def next_look_ns(self) -> int:
        return NEVER

    def at(self, *_: object) -> None: ...

    finished = at

    def rejected(self, *_: object) -> None:
        self.is_refused = True

    aborted = at


class _Until:
    # a request decodes until so many tokens of its answer are left

    def __init__(self, req: RequestState, num_left: int) -> None:
        self._req, self._num_left = req, num_left

    def __contains__(self, number: object) -> bool:
        return number == self._req.request.id and self._req.remaining_output > self._num_left


def config_for(pools: Pools, options: Mapping[str, str]) -> ExperimentConfig:
    """Return the configuration of our simulator for these pools.

    `options` are the settings that both sides share, such as `eviction` and `write_policy`. Cache
    hits do not depend on time with this configuration.

    Raises:
        ValueError: no configuration has pools of these sizes.
    """
    model = MODELS["+".join(name for name in pools.components if name != "full") or "full"]
    page, compat = pools.page_size, options.get("compat", SGLANG)
    eviction = options.get("eviction", "lru")
    # SGLang's host pools have one more page (or state) than requested
    more = int(compat == SGLANG and pools.host_tokens > 0)
    values: dict[str, object] = {
        "model.max_len": pools.max_len + page,
        "cache.page_size": page,
        "cache.policy": "sglang_slru" if eviction == "slru" else eviction,
        "cache.write_policy": options.get("write_policy", "write_through"),
        "cache.device_gib": "null",
        "cache.device.tokens.full": pools.device_tokens,
        "cache.host.tokens.full": pools.host_tokens + more * page,
        "prefetch.stop": "wait_complete",
        "storage.write_queue_gib": 1 << 20,
        "storage.query_s": 0,
        "storage.operation_s": 0,
        "scheduler.chunk_tokens": pools.chunk_tokens,
        "engine.jump": not pools.abort_seed,  # an abort comes after any step of an answer
    }
    if pools.in_flight:
        values |= {"scheduler.max_running": pools.max_running, "engine.jump": False}
    else:  # no space is reserved for other answers
        values |= {"compat.rules.clip_new_tokens": pools.max_len, "scheduler.new_token_ratio": 0}
    is_late = pools.in_flight > 0 and options.get("scheduling") == "asynchronous"
    values["compat.rules.asynchronous"] = is_late
    if options.get("speculation"):
        values |= {"speculation.drafts": 1, "speculation.acceptance": 0}
        values["speculation.cold_acceptance"] = 0
    if options.get("mixed") == "yes":
        values["scheduler.batching"] = "prompts_mixed"
    if pools.window_len and compat != SGLANG:
        # vLLM has one pool of equal blocks for all kinds. This model's pages of full attention and
        # of windows are of one size
        model = "gpt_oss_120b"
        values |= {"cache.pools": "shared_both"}
        if options.get("windows") == "every":
            values |= {"cache.checkpoints": "every", "cache.checkpoint_tokens": page}
    elif pools.num_states and compat != SGLANG:
        values |= {
            "cache.pools": "shared_both",
            **equal_states(page, int(bool(options.get("speculation")))),
        }
    if pools.window_len:
        swa_host_tokens = int(pools.swa_tokens * pools.host_ratio) // page * page
        values |= {
            "model.window_len": pools.window_len,
            "cache.device.tokens.swa": pools.swa_tokens,
            "cache.host.tokens.swa": swa_host_tokens + more * page,
        }
    if pools.num_states:
        values |= {
            "cache.device.states": pools.num_states,
            "cache.host.states": int(pools.num_states * pools.host_ratio) + more,
        }
    storage = "memory" if pools.has_storage else "none"
    files = (f"model={model}", f"compat={compat}", f"storage={storage}")
    changes = options.get("settings", "").split()
    return config_of(*files, *(f"{name}={value}" for name, value in values.items()), *changes)


def request_of(number: int, prompt: Tokens, answer: Tokens) -> Request:
    return Request(
        id=number,
        session_id=number,
        arrival_ns=0,
        prompt=spans_of(prompt),
        output=spans_of(answer),
    )


def equal_states(page_size: int, num_draft_layers: int) -> dict[str, object]:
    """Return shapes of layers for which a state has as many bytes as a page of full attention.

    The draft's layers are part of the page.
    """
    shape = {"num_layers": 64, "num_full_layers": 32, "num_mamba_layers": 32, "conv_taps": 1}
    heads = {"heads": page_size, "head_dim": 16, "state_dim": 32 + num_draft_layers}
    shape |= {f"recurrent_{name}": size for name, size in heads.items()}
    values = {"parallel.tp": 2, "model.pattern": "D F"}
    return values | {f"model.{name}": size for name, size in shape.items()}


def spans_of(tokens: Tokens) -> TokenSpans:
    starts = np.flatnonzero(np.diff(tokens, prepend=tokens[0] - 2) != 1)
    counts = np.diff(starts, append=len(tokens))
    return TokenSpans(tokens[starts].astype(np.int32), counts.astype(np.int32))


open_side = SimulatorSide  # as the protocol asks for it
