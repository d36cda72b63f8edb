"""The decode half of a scheduler: steps of the requests that decode, their memory and their end."""

from collections.abc import Container, Iterable

from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import Purpose
from hicache.config import SchedulerConfig
from hicache.scheduler.admission import NewTokenRatio, are_free, steps_with_pages
from hicache.scheduler.batch import Ended
from hicache.scheduler.drafts import Drafts
from hicache.scheduler.request_state import RequestState

MAX_JUMP = 256  # decode steps planned at once; the executor prices only those before the next event


class Decode:
    """Decides which requests of one engine decode in the next step.

    Args:
        cache: the KV cache that provides the pages.
        config: the settings of the scheduler.
        ended: receives the requests that finish.
        ratio: the share of the answers for which admission reserves memory.
        may_jump: whether several decode steps may be planned at once.
        takes_pages_first: whether a decode step takes its pages before it starts, as real memory
            requires; otherwise it takes them when it ends.
        drafts: how many tokens a step gains; None means one.
    """

    # whether windows are freed when the next step is planned, with `compat.rules.trims_leaves`
    may_leave_at_plan = False

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        ended: Ended,
        ratio: NewTokenRatio,
        *,
        may_jump: bool,
        takes_pages_first: bool = False,
        drafts: Drafts | None = None,
    ) -> None:
        self.cache = cache
        self.config = config
        self.running: list[RequestState] = []
        # answers that are complete, while the requests hold their memory for one more plan
        self.ending: list[RequestState] = []
        # ids of the running requests that decode, while the others keep their pages; None means
        # all. A program that steps the engine by hand sets it
        self.only: Container[int] | None = None
        self._ended = ended
        self._drafts = drafts
        self._ratio = ratio
        self._takes_pages_first = takes_pages_first
        # with trimmed leaves, several steps at once would cut leaves at other pages
        is_safe = cache.windows is None or self.may_leave_at_plan
        self._max_jump = MAX_JUMP if may_jump and is_safe else 1
        self._page = cache.page_size
        kinds = cache.tree.kinds
        self._has_states = bool(kinds.points)
        trims = bool(kinds.windows) and cache.windows is not None
        self._leaves_at_plan = trims and self.may_leave_at_plan
        keeps_states = self._has_states and not cache.rules.keeps_for_repeats
        self._answer_pages = None if keeps_states else cache.knobs.answer_pages

    @property
    def num_ending(self) -> int:
        """The number of requests that only hold their memory for a while."""
        return len(self.ending)

    @property
    def decoding(self) -> list[RequestState]:
        if self.only is None:
            return self.running
        return [req for req in self.running if req.request.id in self.only]

    def take_out(self, request_id: int) -> RequestState | None:
        """Remove and return the running request with this id; None if there is none."""
        for req in self.running:
            if req.request.id == request_id:
                self.running.remove(req)
                return req
        return None

    # -- planning ------------------------------------------------------------------------------

    def draw(self, running: Iterable[RequestState]) -> None:
        if self._drafts is not None:
            self._drafts.draw(running, self._max_jump)

    def steps_unwatched(self, running: list[RequestState]) -> int:
        """Return how many decode steps may pass before an answer ends or enters the tree."""
        if self.ending:  # the next plan may find room
            return 1
        wanted = min([req.remaining_output for req in running])
        if self._drafts is not None:
            wanted = min([len(req.gains) for req in running])
        wanted = min(wanted, self._max_jump)
        if self._answer_pages:
            least = min(map(self._tokens_to_publish, running)) // running[0].most_gain
            wanted = max(min(wanted, least), 1)
        return wanted

    def steps_that_fit(self, running: list[RequestState], wanted: int) -> int:
        """Return for how many of `wanted` decode steps there is memory.

        If a step takes its pages before it starts, they are taken now.
        """
        tree = self.cache.tree
        steps = steps_with_pages(self.cache, running, wanted)
        # under write_back a page that looks evictable may be locked through its descendants:
        # allocate it before the step is planned (several steps use free pages only)
        is_unsure = tree.demotes and not are_free(self.cache, tree.kinds.paged, running, 1)
        if steps and (self._takes_pages_first or is_unsure):
            return steps if self._take_pages(running, steps) else 0
        return steps

    def victim(self) -> RequestState:
        """Return the request that is retracted next, of equal ones the last, as in SGLang."""
        return min(reversed(self.running), key=lambda req: (req.decoded, -req.request.prompt_len))

    def retract(self) -> RequestState:
        """Take the memory of the request with the least computed answer, and return the request.

        It starts again where its answer ends, with a lock on that window alone, and has gained at
        least one token; so the retractions end.
        """
        req = self.victim()
        self.running.remove(req)
        self.cache.abandon(req.sequence)
        req.restart()
        self.cache.counters["scheduler/retracted_count"] += 1
        if self.running:
            self._ratio.retracted(self.running)
        return req

    def _take_pages(self, running: list[RequestState], num_steps: int) -> bool:
        return all(
            self.cache.extend(req.sequence, req.reach(num_steps), Purpose.decode) for req in running
        )

    # -- results -------------------------------------------------------------------------------

    def start(self, req: RequestState, now_ns: int) -> None:
        """Take in a request whose prompt is computed, with the first token of its answer."""
        req.remaining_output -= 1
        if req.first_token_ns is None:
            req.first_token_ns = now_ns
        if not req.remaining_output:
            self._end(req)
            return
        has_next = self.cache.rules.states_per_request > 1
        if self._has_states and has_next and req.sequence.boundary_slot is None:
            req.sequence.boundary_slot = self.cache.take_state_slot(req.sequence)
        self.running.append(req)

    def commit(self, reqs: list[RequestState], num_steps: int) -> None:
        self._ratio.decoded(num_steps)
        cache, page = self.cache, self._page
        has_windows = bool(cache.tree.kinds.window_lens) and not self._leaves_at_plan
        answer_pages, finished = self._answer_pages, []
        gained = num_steps
        for req in reqs:
            sequence = req.sequence
            if req.gains:
                gained = req.take(num_steps)
            req.kv_len = length = req.kv_len + gained
            req.remaining_output = num_left = req.remaining_output - gained
            last = (length - 1) // page
            slides = has_windows and last > sequence.left_page
            if slides:  # first, so that its pages can be taken
                cache.leave_window(sequence, last * page + 1)
            if length > sequence.num_pages * page:
                has_room = cache.extend(sequence, length, Purpose.decode)
                assert has_room, "a decode step was planned without free pages for it"
            if slides and gained > 1:  # also the pages that these steps have passed
                cache.leave_window(sequence, last * page + 1)
            if not num_left:
                finished.append(req)
            if answer_pages and self._tokens_to_publish(req) <= 0:
                self._publish_answer(req, length)
        for req in finished:
            self.running.remove(req)
            self._end(req)

    def _publish_answer(self, req: RequestState, length: int, *, copies: bool = True) -> None:
        keeps = not self.cache.rules.keeps_for_repeats  # else no window of an answer
        end = self.cache.tree.num_pages(length)
        self.cache.publish(req.sequence, end, is_answer=True, keeps_window=keeps, copies=copies)

    def _tokens_to_publish(self, req: RequestState) -> int:
        # tokens until the complete answer pages reach the number to insert at once
        assert self._answer_pages is not None
        pages = req.sequence.tree_pages + self._answer_pages
        return pages * self._page + self.cache.tree.overlap - req.kv_len

    def _end(self, req: RequestState) -> None:
        (self.ending.append if self.cache.rules.asynchronous else self.finish)(req)

    def finish(self, req: RequestState) -> None:
        """Publish the answer of a request that no longer runs, and free the rest of its memory."""
        self._ended.finish(req)
        self.keep(req)

    def keep(self, req: RequestState) -> None:
        """Publish the answer of a request as far as it is computed, and free its other memory."""
        num_pages, sequence = self.cache.tree.num_pages(req.kv_len), req.sequence
        if self._has_states:
            while num_pages in req.missed:
                num_pages -= 1
            if num_pages == req.target_len // self._page:
                self.cache.abandon(sequence)  # there is no state at a page boundary of the answer
                return
            if sequence.boundary_slot and not self.cache.rules.keeps_for_repeats:
                sequence.states[num_pages] = sequence.boundary_slot
                sequence.boundary_slot = None
        self.cache.finish(sequence, num_pages, is_answer=req.decoded > 1)
