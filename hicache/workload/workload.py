"""Builds the workload that a configuration names."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy as copied
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64

from hicache.clock import SECOND_NS
from hicache.config import TraceConfig, WorkloadConfig
from hicache.request import Request, TokenSpans
from hicache.workload.benches import multi_turn, shared_prefix
from hicache.workload.chat_log import load_chat_log
from hicache.workload.data import TRACES, find_trace
from hicache.workload.engine_logs import load_dynamo, load_kv_events, load_lmcache
from hicache.workload.generators import agents, builtin, chat
from hicache.workload.kept import kept
from hicache.workload.mooncake import NAMES, load_mooncake
from hicache.workload.rows import judge_span
from hicache.workload.trace import Trace, TraceError
from hicache.workload.turns import INT32_IDS
from hicache.workload.weka import load_weka
from hicache.workload.windows import cut_window, trees

GENERATORS: dict[str, Callable[..., list[Request]]] = {
    each.__name__: each for each in (builtin, chat, agents, multi_turn, shared_prefix)
}
KINDS = (*GENERATORS, *TRACES)


class Form(NamedTuple):
    """A form of traces: any of `fields` in its first row names it, and `contents` describes it."""

    fields: tuple[str, ...]
    contents: str
    is_drawn: bool = False  # sessions start at random


FORMS = {
    "weka_agentic": Form(("requests",), "sessions of kv-cache-tester and AgentX", is_drawn=True),
    "dynamo": Form(("event", "event_type"), "NVIDIA Dynamo's request trace"),
    "lmcache": Form(("chunk_hashes",), "LMCache's log of lookups"),
    "kv_events": Form(("events",), "KV events of vLLM or SGLang, [time, [event, ...]]"),
    "sharegpt": Form(("conversations",), "ShareGPT's conversations", is_drawn=True),
    "chats": Form(
        ("messages", "prompt", "input", "text_input", "text", "texts", "turns", "usage"),
        "chats or prompts as text, as OpenAI's API and aiperf have them",
    ),
    "turns": Form(
        ("delay",),
        "turns of sessions without times: session_id, input_length, delay",
        is_drawn=True,
    ),
    "blocks": Form(("hash_ids",), "Mooncake's or Bailian's blocks: timestamp, input_length"),
    "lengths": Form(
        ("input_length", *NAMES["input_length"]), "a table of times and lengths with a header"
    ),
}
TIMES = ("timestamp", *NAMES["timestamp"], "timestamp_ms", *NAMES["timestamp_ms"])
ANSWERS = ("output_length", *NAMES["output_length"])
COPY_SPREAD_S = 60.0  # keeps the busy minutes of a trace busy, but hides the ticks of its clock
MOST_SHARED = 50_000  # requests that jobs of one process share
NAME_BITS = 40  # 10,000 sessions collide in 1 of 20,000 traces; a float holds it exactly

# of this process: what earlier jobs of a sweep generated, by seed and settings
_GENERATED: dict[tuple[int, str], list[Request]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    requests: Sequence[Request]
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # of odd rows, for the summary

    @property
    def description(self) -> str:
        num_sessions = len({request.session_id for request in self.requests})
        prompt_tokens = sum(request.prompt_len for request in self.requests)
        answer_tokens = sum(request.output_len for request in self.requests)
        span_s = (self.requests[-1].arrival_ns - self.requests[0].arrival_ns) / SECOND_NS
        drawn = ", session starts drawn" if self.name == "weka_agentic" else ""
        return (
            f"{self.name}: {len(self.requests):,} requests in {num_sessions:,} sessions, "
            f"{_count(prompt_tokens)} prompt and {_count(answer_tokens)} answer tokens, "
            f"arriving over {span_s:,.0f} s{drawn}"
        )


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"


def load_workload(config: WorkloadConfig, *, data_dir: str | None, seed: int) -> Workload:
    """Load or generate the requests of the workload that `config` names.

    The function also scales arrival times, and cuts the workload to `config.limit` requests and to
    one window. The limit never separates a request from the earlier request that it waits for. The
    function does not apply `config.load` (which removes or repeats sessions) or `config.arrivals`.

    Raises:
        ValueError: the kind of workload is unknown, or the trace is unreadable (`TraceError`).
        FileNotFoundError: the trace does not exist.
    """
    kind = config.kind
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = {}
    if kind in GENERATORS:
        requests = _generated(config, seed)
    elif kind in TRACES and isinstance(config, TraceConfig):
        path = find_trace(TRACES[kind], path=config.path, data_dir=data_dir)
        try:
            found = _load_trace(Trace(path, odd_rows=config.odd_rows), config, seed)
            requests, notes, counts = list(found.requests), found.notes, found.counts
        except TraceError as error:
            if config.path is None or kind == "trace":
                raise
            raise TraceError(
                f"{error}; workload={kind} reads only its own format, workload=trace "
                "detects the format"
            ) from error
    else:
        raise ValueError(f"workload.kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if config.max_context is not None:
        requests, ended = _end_sessions(requests, config.max_context)
        notes += ended
    if config.token_stride > 1:
        thinned = partial(_thinned, stride=config.token_stride)
        requests = [
            replace(each, prompt=thinned(each.prompt), output=thinned(each.output))
            for each in requests
        ]
    if config.time_scale != 1:
        requests = [
            replace(each, arrival_ns=round(each.arrival_ns * config.time_scale))
            for each in requests
        ]
    if config.start_jitter_s:
        requests = jitter_starts(requests, config.start_jitter_s, seed)
    if config.slice is not None:
        requests = _renumbered(cut_window(requests, config))
    return Workload(name=kind, requests=requests, notes=notes, counts=counts)


def _generated(config: WorkloadConfig, seed: int) -> list[Request]:
    key = (seed, repr(config))
    requests = _GENERATED.get(key)
    if requests is None:
        requests = _with_session_names(GENERATORS[config.kind](config, seed=seed)[: config.limit])
        if sum(map(len, _GENERATED.values())) + len(requests) > MOST_SHARED:
            return requests
        _GENERATED[key] = requests
    return list(map(copied, requests))  # a class of the user may change them


def _load_trace(trace: Trace, config: TraceConfig, seed: int) -> Workload:
    kind = config.kind
    made_of = (repr((kind, trace.odd_rows)).encode(), *trace.contents)
    form = kept(partial(form_of, trace), *made_of) if kind == "trace" else kind
    if form in ("chats", "sharegpt"):  # keep no parsed copy of private chats
        return _first(config.limit, parsed(trace, form, config, seed))
    # everything that determines the parsed result
    settings: tuple[object, ...] = (
        form,
        config.tokens,
        config.think_cap_s,
        config.block_tokens,
        config.answer_tokens,
        config.time_unit,
    )
    if form in FORMS and FORMS[form].is_drawn:
        settings += (config.session_rate, seed)
    made_of = (repr(settings).encode(), *made_of)
    whole = partial(kept, partial(parsed, trace, form, config, seed), *made_of)
    if config.limit is None:
        return whole()
    limit = config.limit
    return kept(lambda: _first(limit, whole()), str(limit).encode(), *made_of)


def _first(limit: int | None, workload: Workload) -> Workload:
    return replace(workload, requests=workload.requests[:limit])


def parsed(trace: Trace, form: str, config: TraceConfig, seed: int) -> Workload:
    """Parse a trace of a known form; no copy is stored.

    Raises:
        TraceError: too many rows are odd; the message names the file and the first ones.
    """
    if form in ("chats", "sharegpt"):
        requests = load_chat_log(trace, config, seed=seed)
    elif form == "weka_agentic":
        requests = load_weka(trace, config, seed=seed)
    elif form in LOADERS:
        requests = LOADERS[form](trace, config)
    elif config.kind != "trace":  # a public trace, whose blocks and times are known
        requests = load_mooncake(trace, replace(config, time_unit="ms"))
    else:
        unit = "s" if form == "lengths" else "ms"
        requests = load_mooncake(
            trace, config, block_tokens=config.block_tokens, default_unit=unit, seed=seed
        )
    warning = judge_span(trace.path, requests)
    if warning is not None and form in ("chats", "blocks", "lengths") and config.kind == "trace":
        trace.remark(warning)
        sys.stderr.write(f"{warning}\n")  # before the run, which may be long
    return Workload(
        name=config.kind,
        requests=_with_session_names(requests),
        notes=trace.notes,
        counts=trace.counts,
    )


LOADERS = {"dynamo": load_dynamo, "lmcache": load_lmcache, "kv_events": load_kv_events}


def form_of(trace: Trace) -> str:
    """Return the form of a user's trace, such as `chats` or `lengths`, by its first row.

    Raises:
        TraceError: the form is unknown; the message lists the forms that are read.
    """
    known = "\n  ".join(f"{form.fields[0]}: {form.contents}" for form in FORMS.values())
    known = f"Forms that are read, by a field of the first row:\n  {known}"
    try:
        container, record = trace.first()
    except TraceError as error:
        if "not JSON" not in str(error):
            raise
        raise TraceError(f"{error}. {known}") from error
    if isinstance(record, list):
        return "kv_events"
    fields = record if isinstance(record, dict) else {}
    lower = {str(name).lower() for name in fields}
    if "input_length" in fields and container in ("lines", "json"):
        is_timed = fields.get("timestamp") is not None
        return "blocks" if is_timed else "chats" if "messages" in fields else "turns"
    # the names may be private text, and must then not be in a message
    names = [str(name) for name in fields if re.fullmatch(r"[\w .-]{1,40}", str(name))]
    got = ", ".join(names) if len(names) == len(fields) > 0 else "no names"
    for name, form in FORMS.items():
        if not lower & set(form.fields):
            continue
        missing = [each for each in (TIMES, ANSWERS) if not lower & set(each)]
        if name == "lengths" and missing:
            wanted = " or ".join(missing[0])
            raise TraceError(f"{trace.path}: expected a column {wanted}, got {got}")
        return name
    raise TraceError(f"{trace.path}: the form is unknown, with the fields {got}. {known}")


def _with_session_names(requests: Sequence[Request]) -> list[Request]:
    # a part of the trace gives equal names, since those of the file do not depend on other sessions
    names: dict[int, int] = {}
    seen: set[tuple[str, str]] = set()
    for request in requests:
        if request.session_id not in names:
            hasher = xxh3_64(request.namespace.encode())
            hasher.update(request.session_name.encode())
            if (name := (request.namespace, request.session_name)) in seen or not name[1]:
                for spans in (request.prompt, request.output):
                    hasher.update(np.stack([spans.starts, spans.counts]).tobytes())
            seen.add(name)
            names[request.session_id] = hasher.intdigest() >> (64 - NAME_BITS)
    return [replace(request, session_id=names[request.session_id]) for request in requests]


def _end_sessions(
    requests: Sequence[Request], max_context: int
) -> tuple[list[Request], tuple[str, ...]]:
    ended: set[int] = set()
    kept: list[Request] = []
    kept_ids: set[int | None] = {None}
    for request in requests:
        is_longer = request.prompt_len + request.output_len > max_context
        if is_longer or request.session_id in ended or request.parent_id not in kept_ids:
            ended.add(request.session_id)
        else:
            kept.append(request)
            kept_ids.add(request.id)
    if not kept:
        raise ValueError(f"workload.max_context={max_context} leaves no request")
    if len(kept) == len(requests):
        return kept, ()
    all_tokens, kept_tokens = (sum(r.prompt_len for r in each) for each in (requests, kept))
    note = (
        f"{len(requests) - len(kept):,} of {len(requests):,} requests and "
        f"{1 - kept_tokens / all_tokens:.0%} of the prompt tokens left out: their sessions have "
        f"grown longer than workload.max_context={max_context:,}"
    )
    return _renumbered(kept), (note,)


def jitter_starts(requests: Sequence[Request], jitter_s: float, seed: int) -> list[Request]:
    """Delay the start of each session by a random time of less than `jitter_s` seconds.

    Sub-agents are delayed by the same time as the session that started them. The jitter spreads the
    requests of traces with a coarse clock, where many arrive at the same time. The requests get new
    ids in order of arrival.
    """
    generator = np.random.default_rng(seed)
    tree_of = trees(requests)
    shift_of = {
        tree: int(generator.integers(0, round(jitter_s * SECOND_NS)))
        for tree in dict.fromkeys(tree_of.values())
    }
    return _shifted(requests, tree_of, shift_of)


def _within(requests: Sequence[Request], seed: int) -> list[Request]:
    tree_of = trees(requests)
    end_ns = requests[-1].arrival_ns + 1
    generator = np.random.default_rng(seed)
    begin_of: dict[int, int] = {}
    last_of: dict[int, int] = {}
    for request in requests:
        begin_of.setdefault(tree_of[request.id], request.arrival_ns)
        last_of[tree_of[request.id]] = request.arrival_ns
    shift_of = {}
    for tree, begin_ns in begin_of.items():
        passed_ns = begin_ns - requests[0].arrival_ns
        # possible start times, from the first arrival on
        room_ns = end_ns - last_of[tree] + passed_ns
        later_ns = int(generator.integers(0, round(COPY_SPREAD_S * SECOND_NS)))
        shift_of[tree] = (passed_ns + later_ns) % room_ns - passed_ns
    return _shifted(requests, tree_of, shift_of)


def _shifted(
    requests: Sequence[Request], tree_of: Mapping[int, int], shift_of: Mapping[int, int]
) -> list[Request]:
    shifted = {each.id: each.arrival_ns + shift_of[tree_of[each.id]] for each in requests}
    return _renumbered(sorted(requests, key=lambda each: (shifted[each.id], each.id)), shifted)


def sample_sessions(workload: Workload, share: float, seed: int) -> Workload:
    """Return a workload with a random share of the sessions, at least one session.

    `share` is above 0 and at most 1. Sub-agents stay with the session that started them. With the
    same seed, a larger share contains all sessions of a smaller share. The requests get new ids.
    """
    if not 0 < share <= 1:
        raise ValueError(
            f"the share of sessions must be above 0 and at most 1, got {share:g}; repeat_sessions "
            "gives more"
        )
    tree_of = trees(workload.requests)
    names = list(dict.fromkeys(tree_of.values()))
    order = np.random.default_rng(seed).permutation(len(names))
    kept = {names[place] for place in order[: max(round(share * len(names)), 1)].tolist()}
    requests = [request for request in workload.requests if tree_of[request.id] in kept]
    return replace(workload, requests=_renumbered(requests))


def repeat_sessions(workload: Workload, times: float, seed: int) -> Workload:
    """Return a workload that repeats each session, with `times` times the request rate.

    `times` is at least 1. For a fraction, one more copy of some sessions is drawn at random. Every
    copy of the workload has tokens of its own: prompts share prefixes within a copy, but not
    between copies. A repeated session starts within 60 s (`COPY_SPREAD_S`) after its original. A
    session that would then end after the workload starts near the beginning of the workload.

    Raises:
        ValueError: the workload needs more token ids than an int32 can hold.
    """
    parts = [workload] * int(times)
    if times > int(times):
        parts.append(sample_sessions(workload, times - int(times), seed))
    ids_end = max(
        int((spans.starts.astype(np.int64) + spans.counts).max())
        for request in workload.requests
        for spans in (request.prompt, request.output)
    )
    if ids_end * len(parts) > INT32_IDS:
        raise ValueError(
            f"this workload with {ids_end} token ids can be repeated at most "
            f"{INT32_IDS // ids_end} times with new tokens, got {times:.2f} times"
        )
    repeated: list[Request] = []
    for copy, part in enumerate(parts):
        requests = part.requests
        if copy:
            requests = _within(requests, seed + copy)
        first_id, first_token = len(repeated), copy * ids_end
        repeated += [
            replace(
                request,
                id=first_id + request.id,
                session_id=request.session_id + (copy << NAME_BITS),
                parent_id=None if request.parent_id is None else first_id + request.parent_id,
                joins=tuple(first_id + join for join in request.joins),
                prompt=TokenSpans(request.prompt.starts + first_token, request.prompt.counts),
                output=TokenSpans(request.output.starts + first_token, request.output.counts),
            )
            for request in requests
        ]
    repeated.sort(key=lambda request: (request.arrival_ns, request.id))
    return replace(workload, requests=_renumbered(repeated))


def _thinned(spans: TokenSpans, stride: int) -> TokenSpans:
    # the choice depends only on the id, so equal prefixes stay equal
    firsts = -(-spans.starts // stride)
    counts = (spans.starts + spans.counts - 1) // stride - firsts + 1
    kept = counts > 0
    if not kept.any():
        return TokenSpans(spans.starts[:1] // stride, np.ones(1, np.int32))
    return TokenSpans(firsts[kept], counts[kept])


def _renumbered(
    requests: Sequence[Request], arrivals_ns: Mapping[int, int] | None = None
) -> list[Request]:
    # a parent that is not among the requests counts as answered
    ids = {request.id: new_id for new_id, request in enumerate(requests)}
    return [
        Request(  # `replace` takes three times as long
            id=new_id,
            session_id=each.session_id,
            arrival_ns=each.arrival_ns if arrivals_ns is None else arrivals_ns[each.id],
            prompt=each.prompt,
            output=each.output,
            parent_id=None if each.parent_id is None else ids.get(each.parent_id),
            joins=tuple(ids[join] for join in each.joins if join in ids),
            think_ns=each.think_ns,
            stop_reason=each.stop_reason,
            tool=each.tool,
            namespace=each.namespace,
            session_name=each.session_name,
        )
        for new_id, each in enumerate(requests)
    ]
