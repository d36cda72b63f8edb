"""Our cache, driven one request at a time as the peer's is."""

from collections import Counter, deque
from collections.abc import Mapping
from os.path import commonprefix
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf

from experiments.diff.counting import CHUNK_TOKENS, Tally, admission_word, joined
from experiments.diff.protocol import Hits, Outcome, Pools, SideError, Span, Tokens
from experiments.launch.schema import CONF
from hicache.cache.named import RANKING, make_policy
from hicache.cache.pages import PageAllocator
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import BackUp, CopyState, LoadBack, StorageDelete, StorageWrite
from hicache.cache.tree.eviction import POLICIES
from hicache.cache.tree.keys import COMPONENT_TAGS, Key, chain_seed, page_digests
from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import DEVICE, HOST, KIND_NAMES, MAMBA, TIER_NAMES, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import CacheConfig, PrefetchConfig, SchedulerConfig
from hicache.scheduler.admission import Admission
from hicache.scheduler.budget import StepBudget
from hicache.scheduler.decision import Admit

SGLANG = "sglang_0_5_23"
Knobs = TypeVar("Knobs")


def configured(kind: type[Knobs], values: Any, **more: object) -> Knobs:
    """A group of knobs, as a preset sets them and `more` on top of it."""
    made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values, more))
    assert isinstance(made, kind)
    return made


class _Asked(NamedTuple):
    target_len: int
    remaining_output: int


class _Running(NamedTuple):
    sequence: Sequence
    prompt_len: int
    total_len: int


class OurSide:
    """`PrefixCache` and `Prefetcher`, with what the scheduler does around them."""

    def __init__(self, pools: Pools, options: Mapping[str, str]) -> None:
        """`compat`: a preset in `conf/compat`; `eviction`: one of ours, or `module:Class`."""
        compat, eviction = options.get("compat", SGLANG), options.get("eviction", "lru")
        preset = OmegaConf.load(CONF / "compat" / f"{compat}.yaml")
        assert isinstance(preset, DictConfig)
        knobs = configured(CacheConfig, preset.get("cache", {}))
        page = self._page = pools.page_size
        self._pools, self._eviction = pools, eviction
        self._tree = RadixTree(
            page_size=page,
            policy=make_policy("--eviction", eviction, POLICIES, wants={"priority": RANKING}),
            window_len=pools.window_len,
            has_states=pools.num_states > 0,
            split_refreshes=knobs.split_refreshes,
            leaving_refreshes=knobs.leaving_refreshes,
            trims_leaves=knobs.trims_leaves,
        )
        ratio = pools.host_ratio
        is_sglang = self._is_sglang = compat == SGLANG
        # its host pools have a page more than asked
        has_host = int(is_sglang and pools.host_tokens > 0)
        # its requests hold a state more than ours: two to capture into, in turn
        spare_states = pools.num_running if is_sglang else 0
        num_states = pools.num_states and pools.num_states - spare_states
        sizes = (
            (pools.device_tokens // page, pools.swa_tokens // page, num_states),
            (
                pools.host_tokens // page + has_host,
                int(pools.swa_tokens * ratio) // page + has_host,
                int(pools.num_states * ratio) + has_host,
            ),
        )
        device, host = ([PageAllocator(count) for count in tier] for tier in sizes)
        self.cache = PrefixCache(
            self._tree,
            (device, host),
            page_bytes=(1, 1, 1),
            load_back_threshold=knobs.load_back_threshold,
            storage_queue_bytes=1 << 60 if pools.has_storage else None,
            backs_up_answers=knobs.backs_up_answers,
        )
        self._admission = Admission(self.cache, SchedulerConfig(swa_budget="sglang_0_5_23"))
        self._prefetcher = None
        if pools.has_storage:
            # the one stop policy whose outcome hangs on no clock
            prefetch = configured(PrefetchConfig, preset.get("prefetch", {}), stop="wait_complete")
            self._prefetcher = Prefetcher(self.cache, prefetch, pools.host_tokens)
        self._stored: set[Key] = set()
        self._num_stored = [0, 0, 0]
        self._running: dict[int, _Running] = {}
        self._tally = Tally(pools)
        self._evicted: Counter[str] = Counter()
        self._late: deque[tuple[int, BackUp | LoadBack | StorageWrite]] = deque()
        self._now = 0

    def about(self) -> dict[str, str]:
        """Nothing of ours has a release."""
        return {"engine": "hicache", "version": "this checkout", "eviction": self._eviction}

    def admit(self, number: int, tokens: Tokens, prompt_len: int) -> Outcome:
        """A request comes, is admitted at once and prefilled."""
        cache = self.cache
        self._now = number
        self._settle()
        sequence = Sequence(tokens.astype("<i4").tobytes())
        match = cache.match(sequence, prompt_len)
        start = end = new = 0
        if self._prefetcher is not None:
            prefetch = self._prefetcher.prefetch_from_storage(
                number, sequence, match, prompt_len, 0
            )
            if prefetch is not None:
                start = prefetch.start_page * self._page
                self._carry_out(self._prefetcher)
                end = start + prefetch.num_pages * self._page
                new = prefetch.published_pages * self._page
        match = cache.match(sequence, prompt_len)
        lock = cache.tree.lock(match.best_node)
        admission = None
        if self._is_sglang:
            admission = self._decide(match, prompt_len, len(tokens) - prompt_len)
        acquired = cache.acquire(sequence, match, storage_start=start, storage_end=end)
        cache.tree.release(lock)
        if acquired is None:
            raise SideError(f"{self._pools.num_states} states are too few for what runs")
        self._settle()
        self._extend(sequence, prompt_len)
        if self._prefetcher is not None:
            self._prefetcher.forget(number)
        self._publish_prompt(sequence, match, prompt_len)
        self._settle()
        self._running[number] = _Running(sequence, prompt_len, len(tokens) - 1)
        on_device = min(match.device_prefix_len, acquired.cached_len)
        brought = acquired.cached_len - on_device
        # as the peer counts it: pages read for the sake of their state or window alone, which the
        # host had already, are the host's
        from_storage = min(new, brought)
        self._count_evictions()
        return self._tally.outcome(
            Hits(on_device, brought - from_storage, from_storage),
            self._held(),
            swa_loaded=match.swa_host_hit_length,
            states_loaded=match.mamba_host_hit_length,
            admission=admission,
        )

    def _decide(self, match: MatchResult, prompt_len: int, num_new: int) -> str:
        answers = sum(each.total_len + 1 - each.prompt_len for each in self._running.values())
        decision = self._admission.decide(
            _Asked(prompt_len, num_new),
            match,
            StepBudget(chunk_tokens=CHUNK_TOKENS, reserved_tokens=answers),
        )
        return admission_word(decision.chunk_tokens if isinstance(decision, Admit) else None)

    def _publish_prompt(self, sequence: Sequence, match: MatchResult, prompt_len: int) -> None:
        # as the peer's scheduler does: where the prompt left a longer match whose window or state
        # was gone, that point is published first, and the rest with the answer
        cache, page = self.cache, self._page
        is_hybrid = self._tree.has_swa or self._tree.has_states
        end = prompt_len
        if is_hybrid and match.branch_len is not None:
            end = match.branch_len
        if self._tree.has_states:
            # it keeps one state of a prompt, and nothing behind it
            if prompt_len - sequence.tree_pages * page < page:
                return
            spare = cache.take_state_slot()
            if spare is None:
                raise SideError(f"{self._pools.num_states} states are too few for what runs")
            self._keep_state(sequence, end // page)
            sequence.boundary_slot = spare
        cache.leave_window(sequence, end - 1)
        cache.publish(sequence, end // page)
        cache.leave_window(sequence, prompt_len - 1)

    def _keep_state(self, sequence: Sequence, num_pages: int) -> None:
        assert sequence.boundary_slot is not None
        sequence.states[num_pages] = sequence.boundary_slot
        sequence.boundary_slot = None

    def finish(self, number: int) -> None:
        """Its answer is complete."""
        running = self._running.pop(number)
        cache, sequence, total_len = self.cache, running.sequence, running.total_len
        self._extend(sequence, total_len)
        cache.leave_window(sequence, total_len - 1)
        num_pages = total_len // self._page
        if self._tree.has_states:
            if num_pages > running.prompt_len // self._page:
                self._keep_state(sequence, num_pages)
            else:  # no state at a later page
                num_pages = sequence.tree_pages
        cache.finish(sequence, num_pages)
        self._settle()

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        """Which of these tokens are held, by component and tier."""
        size = self._tree.page_bytes
        text = tokens.astype("<i4").tobytes()
        text = text[: len(text) // size * size]
        found: dict[str, list[tuple[int, int]]] = {}
        node: Node | None = self._tree.root("")
        while node is not None:
            start = node.end
            node = node.children.get(text[start * size : (start + 1) * size])
            if node is None:
                break
            same = len(commonprefix([text[start * size :], node.edge])) // size  # noqa: RUF071 - bytes
            for tier, name in zip((DEVICE, HOST), TIER_NAMES, strict=True):
                for kind in self._tree.kinds:
                    is_usable = kind != MAMBA or same == node.num_pages
                    if node.held[tier][kind] is not None and is_usable:
                        span = (start, start + same)
                        found.setdefault(f"{KIND_NAMES[kind]}/{name}", []).append(span)
            if same < node.num_pages:
                break
        digests = page_digests(chain_seed(""), text, size)
        for kind in self._tree.kinds:
            for place, digest in enumerate(digests):
                if digest + COMPONENT_TAGS[kind] in self._stored:
                    name = f"{KIND_NAMES[kind]}/storage"
                    found.setdefault(name, []).append((place, place + 1))
        return {name: joined(spans, self._page, name) for name, spans in found.items()}

    def close(self) -> None:
        """Nothing runs beside."""

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        if not self.cache.extend(sequence, num_tokens):
            raise self._pools.too_small(num_tokens)

    def _unit(self, kind: int) -> int:
        return self._pools.unit(KIND_NAMES[kind])

    def _held(self) -> dict[str, int]:
        resident = self._tree.residency.resident
        held = {
            f"{KIND_NAMES[kind]}/{TIER_NAMES[tier]}": resident[tier][kind] * self._unit(kind)
            for kind in self._tree.kinds
            for tier in (DEVICE, HOST)
        }
        for kind in self._tree.kinds if self._pools.has_storage else ():
            held[f"{KIND_NAMES[kind]}/storage"] = self._num_stored[kind] * self._unit(kind)
        return held

    def _count_evictions(self) -> None:
        for tier in TIER_NAMES:
            for kind in self._tree.kinds:
                component = KIND_NAMES[kind]
                total = self.cache.counters[f"evict/{tier}_{component}_pages"] * self._unit(kind)
                name = f"{component}/{tier}"
                self._tally.evicted(name, total - self._evicted[name])
                self._evicted[name] = total

    def _settle(self) -> None:
        # a back-up that is done asks for a write to storage
        while self.cache.outbox or (self._late and self._late[0][0] <= self._now):
            outbox = self.cache.outbox
            self.cache.outbox = []
            for work in outbox:
                if isinstance(work, CopyState | StorageDelete):
                    continue
                self._late.append((self._now + self._pools.copy_delay, work))
            while self._late and self._late[0][0] <= self._now:
                self._complete(self._late.popleft()[1])

    def _complete(self, work: BackUp | LoadBack | StorageWrite) -> None:
        if isinstance(work, StorageWrite):
            for key, (kind, _) in zip(work.keys, work.pages, strict=True):
                self._tally.moved(KIND_NAMES[kind], "write", self._unit(kind))
                self._num_stored[kind] += key not in self._stored
                self._stored.add(key)
        else:
            how = "back_up" if isinstance(work, BackUp) else "load_back"
            for move in work.moves:
                amount = len(move.sources) * self._unit(move.kind)
                self._tally.moved(KIND_NAMES[move.kind], how, amount)
        self.cache.complete(work)

    def _carry_out(self, prefetcher: Prefetcher) -> None:
        for prefetch in prefetcher.outbox:
            prefetch.restorable = prefetch.ask(lambda keys: [key in self._stored for key in keys])
            prefetcher.on_queried(prefetch)
        prefetcher.outbox.clear()
        for prefetch in prefetcher.reads:
            for kind, pages in enumerate(prefetch.staged):
                self._tally.moved(KIND_NAMES[kind], "read", len(pages) * self._unit(kind))
            prefetch.completed_pages = prefetch.num_pages
            prefetch.restored_pages = prefetch.num_pages
            prefetch.is_read = True
            prefetcher.on_read(prefetch)
        prefetcher.reads.clear()


open_side = OurSide  # as the protocol asks for it
