"""Finds the reason why each token that one engine computes was not a cache hit."""

from dataclasses import dataclass, field

from hicache.cache.kinds import Kinds
from hicache.cache.tree.node import MatchResult
from hicache.config import ExperimentConfig
from hicache.observe.history import PageHistory, PageRegistry, num_leading, sequence_pages
from hicache.observe.missing_pages import MissingPages
from hicache.observe.reasons import Span
from hicache.scheduler.request_state import RequestState


@dataclass(slots=True)
class Case:
    """The reasons why one request had to compute prompt tokens.

    Attributes:
        came_len: tokens in the cache that the request could use when it was submitted.
        found_len: tokens in the cache that it could use at the last lookup.
        req: the request in the engine at which it arrived last.
        match: the result of the lookup for the current admission.
        missing: reasons why tokens after `found_len` were not in the cache.
        spans: two lists of token ranges with reasons. The first list is for the first admission.
            The second list is for tokens computed again after the request was preempted.
    """

    came_len: int = 0  # usable tokens at submission
    found_len: int = 0  # usable tokens at the last match
    full_len: int = 0  # cached tokens then, whether or not they are usable
    dropped_len: int = 0  # and those after them that are dropped for the draft
    req: RequestState | None = None
    match: MatchResult | None = None  # the match that the current admission uses
    missing: list[Span] = field(default_factory=list)  # from `found_len` to the last page boundary
    spans: tuple[list[Span], list[Span]] = field(default_factory=lambda: ([], []))


class Explainer(PageHistory):
    """Follows the cache of one engine, and finds out why requests had to compute tokens.

    Attributes:
        cases: the reasons, by request id. Several engines may share this dictionary. The caller may
            remove the entry of a request that has ended.
    """

    def __init__(
        self,
        registry: PageRegistry,
        kinds: Kinds,
        config: ExperimentConfig,
        cases: dict[int, Case],
        *,
        names_evictions: bool,
    ) -> None:
        super().__init__(registry, kinds)
        self.cases = cases
        self._config = config
        self._names_evictions = names_evictions
        self._page = kinds.page_size

    def matched(self, req: RequestState, match: MatchResult) -> None:
        case = self.cases.get(req.request.id)
        if case is None:
            case = self.cases[req.request.id] = Case()
        if case.req is not req:  # another attempt may be made in another engine
            case.req, case.came_len = req, match.usable_len
            if req.admitted_ns is None:  # an attempt that does not count may have been admitted
                case.spans = ([], [])
        case.found_len, case.full_len = match.usable_len, match.full_len
        case.dropped_len = match.dropped_len

    def starting(self, req: RequestState, match: MatchResult) -> None:
        case, page = self.cases[req.request.id], self._page
        is_again = req.admitted_ns is not None
        has_run = is_again and req.retractions > 0  # in this engine
        first, reach = case.found_len // page, self._num_pages(req)
        case.match, case.missing = match, []
        if first >= reach:
            return
        numbers = sequence_pages(req.sequence, 0, reach)
        seen = num_leading(self.registry.is_seen[numbers])
        full_end, dropped = case.full_len // page, case.dropped_len // page
        after = full_end + dropped
        parts = [(first, full_end), (after, seen)] if dropped else [(first, seen)]
        prefetch, start = (None, first) if has_run else (req.prefetch, case.came_len // page)
        if prefetch is not None:  # the case is new if another engine has ended the request
            start = prefetch.start_page
        for begin, end in [each for each in parts if each[0] < each[1]]:
            missing = MissingPages(
                history=self,
                config=self._config,
                names_evictions=self._names_evictions,
                numbers=numbers[:end],
                full_end=max(full_end, begin),  # an admission may use less
                start=start,
                prefetch=prefetch,
                declined="retracted" if has_run else req.declined,
            )
            case.missing += missing.spans(begin)
        if dropped:
            case.missing.append(Span(full_end * page, after * page, "dropped_for_draft"))
            case.missing.sort()
            first = max(first, after)
        seen = max(first, seen)
        if seen < reach:
            case.missing.append(Span(seen * page, reach * page, "first_seen"))

    def admitted(self, req: RequestState) -> None:
        case, page = self.cases[req.request.id], self._page
        cached_len, target_len = req.cached_len, req.target_len
        is_again = req.admitted_ns is not None
        assert case.match is not None
        spans, case.missing = case.missing, []
        hits = (case.match.usable_len, case.match.device_prefix_len)
        hit_len = next(
            (each for each in hits if self._replay_start(each) == cached_len), cached_len
        )
        if hit_len < case.found_len:
            spans.insert(0, Span(hit_len, case.found_len, self._unused(case)))
        if cached_len < hit_len:
            kind = self.kinds.replayed[0][0]
            spans.insert(0, Span(cached_len, hit_len, "window_not_kept", kind))
        last_page = max(self._num_pages(req) * page, cached_len)
        if last_page < target_len - 1:
            spans.append(Span(last_page, target_len - 1, "page_rounding"))
        spans.append(Span(target_len - 1, target_len, "last_token"))
        self.admit(req.request, req.tokens, hit_len // page)
        case.match = None
        case.spans[is_again].extend(_own(span) if is_again else span for span in spans)

    def canceled(self, req: RequestState) -> None:
        self.forget(req.sequence)

    def _num_pages(self, req: RequestState) -> int:
        # that it may hit
        return max(req.target_len - 1 - self.registry.overlap, 0) // self._page

    def _replay_start(self, hit_len: int) -> int:
        return self.kinds.replay_start(hit_len // self._page) * self._page

    def _unused(self, case: Case) -> str:
        match = case.match
        assert match is not None
        if match.usable_len < case.found_len:
            return "hit_given_up"
        if (
            match.host_hit_length < self._config.compat.rules.load_back_threshold
            and not match.needs_sidecars
        ):
            return "load_back_too_short"
        return "load_back_failed"


def _own(span: Span) -> Span:
    # a retracted request computed the pages itself that are not published
    if span.reason in ("first_seen", "being_computed", "thrown_away"):
        return span._replace(reason="retracted")
    return span
