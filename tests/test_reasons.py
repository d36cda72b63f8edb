"""Why tokens are computed: by workloads where one can tell, and by a replay that never forgets."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.clock import SECOND_NS
from hicache.observe.history import ON_DEVICE, WAS_HELD, PageHistory, PageRegistry, Stored
from hicache.observe.missing_pages import MissingPages
from hicache.observe.reasons import REASONS, Span
from hicache.request import Request
from hicache.results.metrics import RequestRecord, Result, Status, summarize
from hicache.workload.workload import load_workload
from tests.cache.small import named_kinds
from tests.scheduler.world import request_of
from tests.test_experiment import MODELS, config_of, run
from tests.validity import runs

PAGE = 64
LENGTH = 2049  # tokens of the prompt that comes twice: 32 pages and one
EXPLAIN = "engine.explain=true"
# 128 pages on the device, 256 on the host
SMALL = (EXPLAIN, "model=llama3_8b", "parallel.tp=4", "cache.device_gib=1", "cache.host_gib=2")
STORED = ("storage=memory", "prefetch.stop=wait_complete")


def request(number: int, at_s: float, *parts: tuple[int, int]) -> Request:
    """A prompt of spans (first token, count), and an answer of one token."""
    prompt = [token for first, count in parts for token in range(first, first + count)]
    return request_of(number, prompt, [900_000 + number], int(at_s * SECOND_NS))


def again_after_others(*overrides: str) -> RequestRecord:
    """A prompt, three that need all the room there is, and the first one once more."""
    others = [request(number, 10 * number, (100_000 * number, 7_000)) for number in (1, 2, 3)]
    requests = [request(0, 0, (0, LENGTH)), *others, request(4, 40, (0, LENGTH))]
    result = runs.run(runs.workload(requests), *SMALL, "workload.arrivals=open", *overrides)
    return result.records[4]


@pytest.mark.parametrize(
    ("reason", "overrides"),
    [
        ("evicted_host_for_back_up", ("storage=none",)),
        ("back_up_dropped", ("storage=none", "cache.host_gib=0")),
        (
            "evicted_device_for_prefill",
            ("storage=none", "cache.write_policy=write_through_selective"),
        ),
        ("write_dropped", (*STORED, "storage.write_queue_gib=0")),
        ("never_written", (*STORED, "storage.write=selective", "storage.write_hits=5")),
        ("storage_lost", (*STORED, "storage.capacity_gib=0.5")),
        ("prefetch_declined_too_short", (*STORED, "prefetch.threshold=4096")),
        ("prefetch_declined_rate_limited", (*STORED, "prefetch.occupied_share=0")),
        ("prefetch_late", ("storage=memory", "prefetch.stop=best_effort")),
        (
            "prefetch_stopped",
            ("storage=memory", "prefetch.timeout_base_s=0.05", "prefetch.timeout_per_ki_token_s=0",
             "storage.read_gbps=0.1"),
        ),
        ("prefetch_lost", (*STORED, "storage.faults.missing_rate=1")),
    ],
)  # fmt: skip
def test_a_prompt_that_was_here_before_is_computed_for_a_reason(
    reason: str, overrides: Sequence[str]
) -> None:
    record = again_after_others(*overrides)
    assert record.computed_for == {reason: LENGTH - 1, "last_token": 1}


def test_what_storage_brings_back_is_not_computed() -> None:
    assert again_after_others(*STORED).computed_for == {"last_token": 1}


def test_what_lies_in_storage_from_the_start_was_seen_before() -> None:
    made = runs.workload([request(0, 0, (0, LENGTH))])
    warm = (*STORED, "workload.start=warm_storage", "prefetch.threshold=4096")
    record = runs.run(made, *SMALL, *warm).records[0]
    assert record.computed_for == {"prefetch_declined_too_short": LENGTH - 1, "last_token": 1}


@pytest.mark.parametrize(
    ("window_pages", "kind", "late_page", "reason"),
    [
        (0, FULL, 0, "write_pending"),
        (2, SWA, 3, "write_pending"),
        (2, SWA, 2, "write_pending"),
        (2, SWA, 1, "storage_lost"),  # before the window of the last boundary
        (0, MAMBA, 3, "write_pending"),
        (0, MAMBA, 2, "storage_lost"),  # before the state of the last boundary
    ],
)
def test_what_storage_had_not_yet_when_it_was_asked_was_on_its_way(
    window_pages: int, kind: int, late_page: int, reason: str
) -> None:
    numbers = np.arange(4, dtype=np.int32)
    kinds = named_kinds(1, window_len=window_pages, has_states=kind == MAMBA)
    history = PageHistory(PageRegistry({0: request(0, 0, (0, 4)).prompt}, kinds.size), kinds)
    for each in kinds.numbers:
        history.registry.stored[each][:] = Stored.written
    history.registry.written_ns[kind][late_page] = 9
    prefetch = SimpleNamespace(restorable=[], answered_ns=9, names=range(4))
    missing = MissingPages(
        history=history,
        config=config_of(),
        names_evictions=False,
        numbers=numbers,
        full_end=0,
        start=0,
        prefetch=prefetch,  # type: ignore[arg-type]
        declined=None,
    )
    assert missing.spans(0) == [Span(0, 4, reason)]


def test_a_state_in_storage_is_of_no_use_without_the_pages_that_only_the_device_has() -> None:
    kinds = named_kinds(1, has_states=True)
    history = PageHistory(PageRegistry({0: request(0, 0, (0, 4)).prompt}, kinds.size), kinds)
    history.marks[FULL][:] = ON_DEVICE | WAS_HELD
    history.registry.stored[MAMBA][2] = Stored.written
    missing = MissingPages(
        history=history,
        config=config_of(),
        names_evictions=False,
        numbers=np.arange(4, dtype=np.int32),
        full_end=4,
        start=0,
        prefetch=None,
        declined=None,
    )
    wanted = [Span(0, 3, "never_written", FULL), Span(3, 4, "state_not_kept", MAMBA)]
    assert missing.spans(0) == wanted


def test_of_two_that_come_at_once_the_second_one_finds_the_first_one_computing() -> None:
    requests = [request(number, 0, (0, LENGTH)) for number in range(2)]
    first, second = runs.run(runs.workload(requests), *SMALL, "storage=none").records
    assert first.computed_for == {"first_seen": LENGTH - 1, "last_token": 1}
    assert second.computed_for == {"being_computed": LENGTH - 1, "last_token": 1}


def test_what_is_beside_the_last_token_on_its_page_is_rounding() -> None:
    record = runs.run(runs.workload([request(0, 0, (0, 100))]), *SMALL, "storage=none").records[0]
    assert record.computed_for == {"first_seen": PAGE, "page_rounding": 35, "last_token": 1}


def test_a_hit_without_windows_computes_its_last_window_again() -> None:
    requests = [request(0, 0, (0, 8193)), request(1, 60, (0, 4096), (50_000, 1025))]
    told = ("model=gemma3_27b", "workload.arrivals=open", "storage=none", "cache.window=replay")
    record = runs.run(runs.workload(requests), EXPLAIN, *told).records[1]
    assert record.computed_for == {"window_not_kept": 1024, "first_seen": 1024, "last_token": 1}
    assert (record.device_hit_len, record.window_missing_len) == (4096 - 1024, 1024)


@pytest.mark.parametrize(
    ("model", "chunk_tokens", "reason"),
    [("qwen3_next_80b", 8192, "state_not_kept"), ("gemma3_27b", 2048, "window_not_kept")],
)
def test_pages_are_of_no_use_where_no_state_or_window_was_kept(
    model: str, chunk_tokens: int, reason: str
) -> None:
    requests = [request(0, 0, (0, 8193)), request(1, 60, (0, 4096), (50_000, 1025))]
    record = runs.run(
        runs.workload(requests),
        EXPLAIN,
        f"model={model}",
        f"scheduler.chunk_tokens={chunk_tokens}",
        "workload.arrivals=open",
        "storage=none",
    ).records[1]
    assert record.computed_for == {reason: 4096, "first_seen": 1024, "last_token": 1}
    missing = {"state_not_kept": record.state_missing_len, "window_not_kept": 0}
    assert missing[reason] + record.window_missing_len == 4096


# -- whole runs ----------------------------------------------------------------------------------

TIGHT = ("cache.device_gib=4", "cache.host_gib=4")


def first_seen(
    requests: Iterable[Request], records: Sequence[RequestRecord], page: int
) -> dict[int, int]:
    """What a cache that never forgets would compute, but for the last page: by request.

    It knows a request's prompt and answer from when that request is admitted.
    """
    by_id = {each.id: each for each in requests}
    known: set[int] = set()
    missing = {}
    for record in sorted(records, key=lambda each: (admitted_ns(each), each.arrival_ns, each.id)):
        each = by_id[record.id]
        tokens = each.prompt.to_bytes() + each.output.to_bytes()
        chain = []
        before = hash(each.namespace)
        for end in range(page, each.prompt_len + each.output_len, page):
            before = hash((before, tokens[(end - page) * 4 : end * 4]))
            chain.append(before)
        reach = (each.prompt_len - 1) // page
        hits = next((n for n in range(reach) if chain[n] not in known), reach)
        missing[record.id] = (reach - hits) * page
        known.update(chain)
    return missing


def admitted_ns(record: RequestRecord) -> int:
    return record.arrival_ns + record.queue_ns + record.storage_wait_ns


@pytest.fixture(scope="module", params=[*MODELS, "hymba_1b5"])
def tight(request: pytest.FixtureRequest) -> tuple[Result, list[Request], int]:
    """A run short of everything, its requests, and the tokens of a page."""
    short = {
        "tiny_hybrid": ("cache.device_gib=0.05", "cache.host_gib=0.05"),
        "hymba_1b5": ("cache.device_gib=0.5", "cache.host_gib=0.5", "workload.token_stride=8"),
    }.get(request.param, TIGHT)
    config = config_of(EXPLAIN, f"model={request.param}", *short, "storage.write_queue_gib=0.2")
    workload = load_workload(config.workload, data_dir=None, seed=config.seed)
    return run(config, workload=workload), list(workload.requests), config.cache.page_size


def test_reasons_add_up_to_what_is_computed(tight: tuple[Result, list[Request], int]) -> None:
    result, _, _ = tight
    summary = summarize(result.records, result.measures)
    for area in ("computed", "recomputed"):
        reasons = {
            key: tokens
            for key, tokens in summary.items()
            if key.startswith(f"{area}/") and "_missing_" not in key
        }
        assert sum(reasons.values()) == summary[f"cache/{area}_tokens"]
    assert sum(summary[f"computed/{name}_tokens"] for name in ("first_seen", "last_token"))


def test_what_is_first_seen_is_what_a_cache_that_never_forgets_would_compute(
    tight: tuple[Result, list[Request], int],
) -> None:
    result, requests, page = tight
    records = [record for record in result.records if record.status is Status.finished]
    wanted = first_seen(requests, records, page)
    assert {each.id: each.computed_for.get("first_seen", 0) for each in records} == wanted


def test_the_parts_of_a_wait_add_up_to_it(tight: tuple[Result, list[Request], int]) -> None:
    result, _, _ = tight
    for record in result.records:
        if record.status is Status.finished:
            assert sum(record.queue_for_ns.values()) == record.queue_ns
            assert sum(record.prefill_for_ns.values()) == record.prefill_ns


def test_only_a_simulated_run_is_explained() -> None:
    with pytest.raises(ValueError, match=r"engine\.explain=true needs executor\.kind=simulated"):
        config_of(EXPLAIN, "executor=torch")


def test_nothing_else_depends_on_whether_reasons_are_found() -> None:
    asked, unasked = (
        summarize(result.records, result.measures)
        for result in (run(config_of(*TIGHT, EXPLAIN)), run(config_of(*TIGHT)))
    )
    is_reason = {key: key.partition("/")[0] in ("computed", "recomputed") for key in asked}
    assert sum(is_reason.values()) == 2 * len(REASONS) + 2
    assert {key: value for key, value in asked.items() if not is_reason[key]} == unasked
