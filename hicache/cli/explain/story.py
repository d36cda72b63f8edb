"""Explains a request in words: what it waited for, and why it missed the KV cache."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cli.explain.rerun import Rerun
from hicache.cli.explain.segments import Segment, Steps, attempts_of, segments_of, steps_of_prompt
from hicache.observe.reasons import REASONS, Span
from hicache.results.metrics import QUEUE_CAUSES, RequestRecord, Status
from hicache.scheduler.handover import Handover
from hicache.scheduler.request_state import RequestState

MOST_NAMED = 3  # at most this many other requests are named by their ids
DECLINED = {
    "declined_too_short": "fewer than prefetch.threshold tokens were missing",
    "declined_no_host": "the host tier has no page (cache.host_gib)",
    "declined_rate_limited": "other prefetches used up prefetch.occupied_share",
    "declined_anchor_not_on_host": "the matched prefix was on the device but not on the host",
    "no_room": "the host had no room for it",
}
# parts of the prefill in which no step of the request ran
BETWEEN = {
    "fence": "before its steps, it waited {} for copies of evicted pages to the host",
    "stalled": "between its steps, it waited {} for pages",
}


class Storyteller:
    def __init__(self, run: Rerun) -> None:
        self._run = run
        self._page = run.config.cache.page_size
        self._steps = {number: Steps(run.timeline, number) for number in run.timeline.turns}

    def tell(self, record: RequestRecord) -> Iterator[str]:
        session = record.session_name or record.session_id
        yield f"Request {record.id}, session {session}, {self._run.engine_name(record.engine)}"
        life = self._run.timeline.lives.get(record.id)
        if life is None:
            yield f"  {record.status.value}: {record.reason}"
            return
        yield f"  {_size(record)}"
        segments = segments_of(record, self._run.timeline, self._steps)
        yield f"  {_headline(record)}"
        yield ""
        yield "  What happened"
        for at_ns, told in sorted(self._events(record, life, segments), key=lambda each: each[0]):
            yield f"    {_seconds(at_ns - record.arrival_ns, sign='+'):>10}  {told}"
        yield ""
        case = self._run.timeline.cases[record.id]
        yield from _reasons("Why it computed", record, record.computed_len, case.spans[0])
        if record.recomputed_len:
            again = case.spans[1]
            yield from _reasons("Why it recomputed", record, record.recomputed_len, again)

    # -- what happened -------------------------------------------------------------------------

    def _events(
        self, record: RequestRecord, life: RequestState, segments: list[Segment]
    ) -> Iterator[tuple[int, str]]:
        arrival_ns = record.arrival_ns
        came_len = self._run.timeline.cases[record.id].came_len
        attempts = attempts_of(life, record.first_token_ns or record.finish_ns or 0)
        who = self._run.engine_name(attempts[-1].prefill) if attempts else "the scheduler first"
        yield (
            arrival_ns,
            f"arrived {_seconds(arrival_ns)} into the run; {came_len:,} tokens of its prompt "
            f"were cached and usable when {who} considered it",
        )
        yield from self._prefetch(life)
        for each in attempts:
            yield from self._handover(each)
        for segment in _joined(segments):
            if segment.part == "queue":
                yield segment.start_ns, self._queue(record, segment)
            if segment.part == "storage_wait":
                yield segment.start_ns, self._storage_wait(record, life, segment)
        if life.admitted_ns is not None:
            yield life.admitted_ns, f"admitted, {_found(record)}"
            yield from self._prefill(record, life, attempts)
        if record.first_token_ns is not None:
            yield record.first_token_ns, "first token"
        if record.retractions:
            yield (
                record.finish_ns or 0,
                f"(it was retracted {_count(record.retractions, 'time')} for lack of pages)",
            )
        if record.finish_ns is not None:
            ending = f"finished its answer of {record.output_len:,} tokens"
            yield record.finish_ns, ending if record.status is Status.finished else record.reason

    def _handover(self, handover: Handover) -> Iterator[tuple[int, str]]:
        begun_ns, computed_ns = handover.begun_ns or 0, handover.computed_ns
        decode, prefill = map(self._run.engine_name, (handover.decode, handover.prefill))
        yield (
            begun_ns,
            f"{decode} admitted it, promised {handover.promised_len:,} tokens, and asked {prefill} "
            "for the others",
        )
        for at_ns, told in self._prefetch(handover.prompt):
            yield at_ns, f"{prefill}: {told}"
        if computed_ns is not None:
            told = f"{prefill} has computed its prompt"
            yield computed_ns, told + " and sends the last KV" * (not handover.is_dead)
        ended_ns = handover.ended_ns
        if handover.is_dead and ended_ns is not None:
            why = "KV or an engine was lost" if handover.is_lost else "it was given up"
            yield ended_ns, f"{decode} ended this attempt: {why}"
        elif handover.arrived_ns is not None and computed_ns is not None:
            took = _seconds(handover.arrived_ns - computed_ns)
            yield handover.arrived_ns, f"its KV has arrived, {took} after the last was computed"
            if ended_ns is not None and ended_ns > handover.arrived_ns:
                waited = _seconds(ended_ns - handover.arrived_ns)
                yield ended_ns, f"{decode} can decode it, after {waited} for what it promised"

    def _queue(self, record: RequestRecord, segment: Segment) -> str:
        took, what = _seconds(segment.length_ns), QUEUE_CAUSES[segment.cause]
        told = f"waited {took} for {what}"
        if segment.first not in (None, record.id):
            told = f"waited {took} behind request {segment.first}, which waited for {what}"
        prompts: Counter[int] = Counter()
        running: set[int] = set()
        for step in self._steps[segment.engine].during(segment.start_ns, segment.end_ns):
            inside_ns = min(step.end_ns, segment.end_ns) - max(step.start_ns, segment.start_ns)
            num_tokens = sum(end - first for _, first, end in step.extends)
            for request_id, first, end in step.extends:
                prompts[request_id] += inside_ns * (end - first) // num_tokens
            running.update(step.decodes)
        others = [f"{number} ({_seconds(ns)})" for number, ns in prompts.most_common()]
        if others:
            told += f"; meanwhile the prompts of these requests were computed: {_and(others)}"
        known = [self._run.records[number] for number in running if number in self._run.records]
        if known and segment.cause not in ("step", "chunk"):
            known.sort(key=lambda each: (-each.prompt_len, each.id))
            named = [f"{each.id} ({each.prompt_len:,} tokens)" for each in known[:MOST_NAMED]]
            told += "; meanwhile decoding: " + _and(named)
            told += f" and {len(known) - MOST_NAMED} smaller ones" * (len(known) > MOST_NAMED)
        return told

    def _storage_wait(self, record: RequestRecord, life: RequestState, segment: Segment) -> str:
        told = f"waited {_seconds(segment.length_ns)} for its prefetch"
        began_ns = segment.end_ns
        if life.prefetch is not None and life.prefetch.read_ns is not None:
            began_ns = min(life.prefetch.read_ns[0], segment.end_ns)
        before = [
            str(number)
            for number, other in self._run.timeline.lives.items()
            if number != record.id and other.prefetch is not None
            if (read_ns := other.prefetch.read_ns) is not None
            if read_ns[0] < began_ns and read_ns[1] > segment.start_ns
        ]
        if before:
            told += f"; storage first read for other requests: {_and(before)}"
        return told

    def _prefetch(self, life: RequestState) -> Iterator[tuple[int, str]]:
        prefetch = life.prefetch
        if prefetch is None:
            if life.declined is not None:
                yield life.looked_ns, f"no prefetch was started: {DECLINED[life.declined]}"
            return
        first, asked = prefetch.start_page * self._page, prefetch.asked_pages * self._page
        whom, who = "storage", "storage"
        if self._run.config.storage.kind == "peers":
            whom, who = "the other engines", f"engine {prefetch.source}"
        yield (
            prefetch.enqueued_ns,
            f"prefetch: asked {whom} for {asked:,} tokens from token {first:,} on"
            + self._cut(prefetch),
        )
        if prefetch.answered_ns is not None:
            hit = max(prefetch.restorable or [0]) * self._page
            yield prefetch.answered_ns, f"{who} answered: {hit:,} of these tokens can be restored"
        if prefetch.read_ns is not None:
            began_ns, ended_ns = prefetch.read_ns
            read, planned = prefetch.completed_pages * self._page, prefetch.num_pages * self._page
            yield began_ns, "prefetch: reading began"
            yield (
                ended_ns,
                f"prefetch: reading ended, {read:,} of {planned:,} tokens, {self._worth(prefetch)}",
            )
        elif prefetch.was_stopped and prefetch.phase is Phase.ended:
            yield life.admitted_ns or prefetch.enqueued_ns, "prefetch: dropped before it was read"

    def _cut(self, prefetch: Prefetch) -> str:
        named = len(prefetch.names)
        if named == prefetch.asked_pages:
            return ""
        return f", cut to {named * self._page:,} tokens for lack of host memory"

    def _worth(self, prefetch: Prefetch) -> str:
        published = prefetch.published_pages * self._page
        if prefetch.was_stopped and prefetch.completed_pages < prefetch.num_pages:
            return f"stopped by {self._run.config.prefetch.stop}; {published:,} of them kept"
        return f"{published:,} of them not yet on the host"

    def _prefill(
        self, record: RequestRecord, life: RequestState, attempts: Sequence[Handover]
    ) -> Iterator[tuple[int, str]]:
        until_ns = record.first_token_ns or record.finish_ns or 0
        steps = steps_of_prompt(record, attempts, self._steps, until_ns)
        if not steps or life.admitted_ns is None:
            return
        parts = record.prefill_for_ns
        told = f"computed its prompt in {_count(len(steps), 'step')}: "
        told += f"{_seconds(parts.get('own', 0))} for its own {record.computed_len:,} tokens"
        others = {other for step in steps for other, _, _ in step.extends} - {record.id}
        if parts.get("shared"):
            named = [str(other) for other in sorted(others)]
            whose = (
                f"request{'s' * (len(others) > 1)} {_and(named)}" if named else "decoding requests"
            )
            told += f", {_seconds(parts['shared'])} for {whose} in the same steps"
        if record.load_back_ns:
            told += f", {_seconds(record.load_back_ns)} waiting for load-backs"
        yield steps[0].start_ns, told
        for part, waited in BETWEEN.items():
            if parts.get(part):
                yield steps[0].start_ns, f"({waited.format(_seconds(parts[part]))})"


def _reasons(
    title: str, record: RequestRecord, num_tokens: int, spans: Iterable[Span]
) -> Iterator[str]:
    yield f"  {title} {_count(num_tokens, 'token')}"
    for span in spans:
        what = {FULL: "", MAMBA: " (state)"}.get(span.kind, " (window)")
        yield f"    {span.num_tokens:>9,}  {span.reason}{what}: {REASONS[span.reason]}"
        if span.reason not in ("first_seen", "being_computed"):
            yield from (f"{'':15}{told}" for told in _evictions(record, span))


def _evictions(record: RequestRecord, span: Span) -> Iterator[str]:
    groups = sorted(span.evictions, key=lambda each: -each.num_pages)
    for eviction in groups[:MOST_NAMED]:
        what = "a state" if span.kind == MAMBA else _count(eviction.num_pages, "page")
        late_ns = eviction.when_ns - record.arrival_ns
        when = f"{_seconds(abs(late_ns))} {'after' if late_ns >= 0 else 'before'} its arrival"
        yield f"{what} evicted {when}, for request {eviction.request_id}"
    if len(groups) > MOST_NAMED:
        yield f"and {len(groups) - MOST_NAMED} more evictions"


def _size(record: RequestRecord) -> str:
    tiers = (
        (record.device_hit_len, "on the device"),
        (record.host_hit_len, "on the host"),
        (record.storage_hit_len, "read from storage"),
        (record.peer_hit_len, "read from the host of another engine"),
        (record.computed_len, "computed"),
    )
    parts = [f"{length:,} {where}" for length, where in tiers if length]
    if record.reused_len:
        parts.append(f"{record.reused_len:,} of them also held by the decode engine")
    if record.draft_cold_len:
        parts.append(f"{record.draft_cold_len:,} of the hits without KV of the draft")
    return f"prompt of {record.prompt_len:,} tokens: {', '.join(parts) or 'never admitted'}"


def _headline(record: RequestRecord) -> str:
    if record.ttft_ns is None:
        return f"{record.status.value} before its first token: {record.reason}"
    told = f"first token after {_seconds(record.ttft_ns)}"
    causes = Counter(
        {
            f"in the queue, waiting for {QUEUE_CAUSES[key]}": ns
            for key, ns in record.queue_for_ns.items()
        }
    )
    causes["waiting for its prefetch"] = record.storage_wait_ns
    causes["waiting for load-backs"] = record.load_back_ns
    parts = record.prefill_for_ns
    causes["waiting for KV from another engine"] = record.transfer_ns
    causes["waiting for the promised tokens"] = record.restore_ns
    causes["computing its own tokens"] = parts.get("own", 0)
    causes["computing tokens of other requests in the same steps"] = parts.get("shared", 0)
    causes["waiting between its steps"] = parts.get("fence", 0) + parts.get("stalled", 0)
    cause, most_ns = causes.most_common(1)[0]
    return f"{told}, {most_ns / max(record.ttft_ns, 1):.0%} of it {cause}"


def _found(record: RequestRecord) -> str:
    hit = record.prompt_len - record.computed_len
    return f"{hit:,} prompt tokens were hits" if hit else "without a hit"


def _joined(segments: list[Segment]) -> Iterator[Segment]:
    # merge neighbors with the same part and cause; segments leave no gaps
    for _, neighbors in groupby(
        segments, key=lambda each: (each.part, each.cause, each.engine, each.first)
    ):
        joined = list(neighbors)
        yield joined[0]._replace(end_ns=joined[-1].end_ns)


def _seconds(ns: int, *, sign: str = "") -> str:
    if abs(ns) < 1_000_000:
        return f"{sign}{ns / 1e3:.0f} µs"
    return f"{sign}{ns / 1e6:.1f} ms" if abs(ns) < 1_000_000_000 else f"{sign}{ns / 1e9:,.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _and(items: list[str]) -> str:
    if len(items) > MOST_NAMED:
        items = [*items[:MOST_NAMED], f"{len(items) - MOST_NAMED} more"]
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
