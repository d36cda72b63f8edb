"""Reasons of computed tokens, in workloads made by hand and against a cache of infinite size."""

from types import SimpleNamespace

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.clock import SECOND_NS
from hicache.observe.history import ON_DEVICE, WAS_HELD, PageHistory, PageRegistry, Stored
from hicache.observe.missing_pages import MissingPages
from hicache.observe.reasons import REASONS, Span
from hicache.results.metrics import Status, summarize
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


def request(number, at_s, *parts):
    """A prompt of spans (first token, count), and an answer of one token."""
    prompt = [token for first, count in parts for token in range(first, first + count)]
    return request_of(number, prompt, [900_000 + number], int(at_s * SECOND_NS))


@pytest.mark.parametrize(
    ("reason", "overrides"),
    [
        ("evicted_host_for_back_up", ("storage=none",)),
        ("back_up_dropped", ("storage=none", "cache.host_gib=0.1")),
        ("evicted_device_for_prefill", ("storage=none", "cache.host_gib=0")),
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
        (None, STORED),
    ],
)  # fmt: skip
def test_a_prompt_that_is_repeated_is_computed_for_the_reason_that_its_settings_cause(
    reason, overrides
):
    others = [request(number, 10 * number, (100_000 * number, 7_000)) for number in (1, 2, 3)]
    requests = [request(0, 0, (0, LENGTH)), *others, request(4, 40, (0, LENGTH))]
    made = runs.workload(requests)
    record = runs.run(made, *SMALL, "workload.arrivals=open", *overrides).records[4]
    assert record.computed_for == ({reason: LENGTH - 1} if reason else {}) | {"last_token": 1}


def missing_pages(kinds, *, full_end=0, prefetch=None):
    """The missing pages of a prompt of four one-token pages, and the history that explains them."""
    history = PageHistory(PageRegistry({0: request(0, 0, (0, 4)).prompt}, kinds.size), kinds)
    missing = MissingPages(
        history=history,
        config=config_of(),
        names_evictions=False,
        numbers=np.arange(4, dtype=np.int32),
        full_end=full_end,
        start=0,
        prefetch=prefetch,
        declined=None,
    )
    return missing, history


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
def test_pages_written_after_the_query_of_a_prefetch_count_as_pending(
    window_pages, kind, late_page, reason
):
    kinds = named_kinds(1, window_len=window_pages, has_states=kind == MAMBA)
    prefetch = SimpleNamespace(restorable=[], answered_ns=9, names=range(4))
    missing, history = missing_pages(kinds, prefetch=prefetch)
    for each in kinds.numbers:
        history.registry.stored[each][:] = Stored.written
    history.registry.written_ns[kind][late_page] = 9
    assert missing.spans(0) == [Span(0, 4, reason)]


def test_a_state_in_storage_is_useless_if_only_the_device_has_its_pages():
    missing, history = missing_pages(named_kinds(1, has_states=True), full_end=4)
    history.marks[FULL][:] = ON_DEVICE | WAS_HELD
    history.registry.stored[MAMBA][2] = Stored.written
    wanted = [Span(0, 3, "never_written", FULL), Span(3, 4, "state_not_kept", MAMBA)]
    assert missing.spans(0) == wanted


BRANCH = [request(0, 0, (0, 8193)), request(1, 60, (0, 4096), (50_000, 1025))]
TWO = [request(number, 0, (0, LENGTH)) for number in range(2)]
WARM = (*SMALL, *STORED, "workload.start=warm_storage", "prefetch.threshold=4096")
GEMMA = ("model=gemma3_27b", "workload.arrivals=open")
QWEN = ("model=qwen3_next_80b", "workload.arrivals=open", "scheduler.chunk_tokens=8192")


@pytest.mark.parametrize(
    ("requests", "overrides", "missing", "first_seen"),
    [
        ([request(0, 0, (0, 100))], SMALL, {"page_rounding": 35}, PAGE),
        (TWO, SMALL, {"being_computed": LENGTH - 1}, 0),
        # in storage from the start
        (TWO[:1], WARM, {"prefetch_declined_too_short": LENGTH - 1}, 0),
        (BRANCH, (*GEMMA, "cache.window=replay"), {"window_not_kept": 1024}, 1024),
        (BRANCH, (*GEMMA, "scheduler.chunk_tokens=2048"), {"window_not_kept": 4096}, 1024),
        (BRANCH, QWEN, {"state_not_kept": 4096}, 1024),
    ],
)
def test_the_last_request_has_the_expected_reasons(requests, overrides, missing, first_seen):
    result = runs.run(runs.workload(requests), EXPLAIN, "storage=none", *overrides)
    record = result.records[-1]
    new = {"first_seen": first_seen} if first_seen else {}
    assert record.computed_for == missing | new | {"last_token": 1}
    assert record.state_missing_len == missing.get("state_not_kept", 0)
    assert record.window_missing_len == missing.get("window_not_kept", 0)
    assert record.device_hit_len == record.prompt_len - sum(record.computed_for.values())


# -- whole runs ----------------------------------------------------------------------------------

TIGHT = ("cache.device_gib=4", "cache.host_gib=4")


def first_seen(requests, records, page):
    """By request id, the tokens that an infinite cache would compute, without the last page.

    That cache holds a request's prompt and answer from the admission of that request on.
    """
    by_id = {each.id: each for each in requests}
    known, missing = set(), {}
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


def admitted_ns(record):
    return record.arrival_ns + record.queue_ns + record.storage_wait_ns


@pytest.mark.parametrize("model", [*MODELS, "hymba_1b5"])
def test_reasons_add_up_and_first_seen_tokens_are_those_of_an_infinite_cache(model):
    short = {
        "tiny_hybrid": ("cache.device_gib=0.05", "cache.host_gib=0.05"),
        "hymba_1b5": ("cache.device_gib=0.5", "cache.host_gib=0.5", "workload.token_stride=8"),
    }.get(model, TIGHT)
    config = config_of(EXPLAIN, f"model={model}", *short, "storage.write_queue_gib=0.2")
    workload = load_workload(config.workload, data_dir=None, seed=config.seed)
    result = run(config, workload=workload)
    summary = summarize(result.records, result.measures)
    for area in ("computed", "recomputed"):
        reasons = [
            tokens
            for key, tokens in summary.items()
            if key.startswith(f"{area}/") and "_missing_" not in key
        ]
        assert sum(reasons) == summary[f"cache/{area}_tokens"]
    records = [record for record in result.records if record.status is Status.finished]
    wanted = first_seen(workload.requests, records, config.cache.page_size)
    assert {each.id: each.computed_for.get("first_seen", 0) for each in records} == wanted
    assert sum(wanted.values()) > 0
    for record in records:
        assert sum(record.queue_for_ns.values()) == record.queue_ns
        assert sum(record.prefill_for_ns.values()) == record.prefill_ns


def test_explaining_a_run_adds_reasons_and_changes_no_other_result():
    explained, plain = (
        summarize(result.records, result.measures)
        for result in (run(config_of(*TIGHT, EXPLAIN)), run(config_of(*TIGHT)))
    )
    reasons = [key for key in explained if key.partition("/")[0] in ("computed", "recomputed")]
    assert len(reasons) == 2 * len(REASONS) + 2
    assert {key: value for key, value in explained.items() if key not in reasons} == plain
