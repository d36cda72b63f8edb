"""What scenarios have found and no other test holds, as small as it was made."""

import pytest

from hicache.observe.invariants import BrokenLawError
from hicache.scheduler.prefill import Prefill
from tests.fuzz.scenario import PLAIN
from tests.fuzz.trial import try_choices

# one law each, and what broke it
FOUND = {
    # a last page that was loaded while another request published it stayed on both tiers
    "an_exclusive_host_frees_a_last_page_when_its_copy_is_done": (
        {
            "cache.loads_last_page": "True",
            "workload.arrivals": "closed",
            "cache.page_size": "1",
            "host.layout": "both",
        },
        18,
    ),
    # a window of a leaf that may not leave was copied, which queued the leaf again, without end
    "a_victim_that_may_not_leave_a_shared_device_is_asked_once": (
        {
            "seed": "222",
            "kinds": "chunks",
            "cache.write_policy": "write_back_watermark",
            "storage.speed": "slow_writes",
            "host.layout": "one_pool_a_tier",
        },
        40,
    ),
    # a hit that was given up hid which full pages are cached
    "what_a_given_up_hit_did_not_use_has_a_reason": (
        {"kinds": "parts", "cache.page_size": "1", "pools.swa_device": "0.0"},
        18,
    ),
    # a run of decode steps that was planned before, and waited for a copy, began as it was
    "whoever_comes_while_a_step_is_held_is_looked_at_after_it": (
        {
            "seed": "213",
            "kinds": "all",
            "copies": "slow",
            "workload.arrivals": "closed",
            "workload.concurrency": "2",
            "cache.write_policy": "write_back",
            "pools.full_device": "3.0",
            "pools.write_queue": "0.0",
        },
        21,
    ),
    "a_router_sees_the_pages_that_a_run_of_steps_has_evicted_so_far": (
        {
            "seed": "25",
            "kinds": "full_mamba",
            "parallel.tp": "2",
            "cache.checkpoints": "every",
            "pages.scheduler.chunk_tokens": "1",
            "seam": "look_of_a_router",
        },
        22,
    ),
    # under write_back a single step took its pages as it began, several at once as they ended
    "a_row_sees_the_pages_of_a_step_when_it_has_ended": (
        {
            "cache.page_size": "8",
            "cache.write_policy": "write_back",
            "pages.scheduler.chunk_tokens": "1",
        },
        8,
    ),
    # an answer of storage took host pages before steps taken at once had freed those on the device
    "ranks_agree_on_what_the_steps_before_have_left": (
        {
            "talk.namespaces": "3",
            "compat": "sglang_0_5_23",
            "cache.page_size": "8",
            "parallel.collective_s": "0.0",
            "pools.full_device": "3.0",
            "storage.query_s": "0.01",
            "seam": "votes_of_a_step_ago",
        },
        25,
    ),
    "leaves_that_lose_single_pages_are_cut_alike_however_many_steps_are_taken_at_once": (
        {"compat": "vllm_0_33", "cache.page_size": "2"},
        18,
    ),
    # explained by who looks at all engines, while the router looks at none
    "what_other_engines_have_computed_is_up_to_date_whatever_the_router_looks_at": (
        {
            "seed": "153",
            "model.window_len": "100",
            "kinds": "full_swa",
            "parallel.replicas": "3",
            "parallel.router": "round_robin",
            "workload.arrivals": "closed",
            "patience": "long",
            "cache.page_size": "1",
            "scheduler.scan_limit": "1",
            "scheduler.batching": "mixed",
            "storage.batch_pages": "1",
            "storage.faults": "full",
        },
        39,
    ),
    # who had room until its own path was locked was not looked at before free pages had run out
    "a_shortage_behind_a_lock_may_become_one_of_windows_when_a_page_is_filled": (
        {
            "seed": "1988",
            "kinds": "full_swa",
            "copies": "slow",
            "workload.arrivals": "closed",
            "compat": "sglang_0_5_23",
            "cache.page_size": "2",
            "cache.write_policy": "write_back",
            "prefetch.occupied_share": "0.3",
            "scheduler.batching": "mixed",
            "scheduler.clip_new_tokens": "4",
            "scheduler.new_token_ratio_decay_steps": "5",
        },
        35,
    ),
    # a loaded window that its request gave up was taken for one that had been evicted
    "a_window_that_its_request_gave_up_was_not_kept": (
        {
            "seed": "60",
            "kinds": "all",
            "compat": "vllm_0_33",
            "cache.page_size": "1",
            "cache.write_policy": "write_back",
        },
        20,
    ),
    # room for a copy was made with the copy of the node before it
    "a_copy_of_all_kinds_or_none_makes_no_room_with_the_prefix_it_follows": (
        {
            "seed": "67",
            "kinds": "full_mamba",
            "copies": "slow",
            "parallel.replicas": "2",
            "parallel.router": "scored",
            "talk.namespaces": "3",
            "workload.arrivals": "open",
            "scheduler.begin_s": "0.001",
            "compat": "vllm_0_33",
            "compat.quirks.evicts_whole": "True",
            "compat.quirks.split_refreshes": "True",
            "compat.quirks.loads_states_twice": "True",
            "cache.page_size": "64",
            "storage.speed": "slow_reads",
            "storage.batch_pages": "3",
            "executor.capture": "cut",
        },
        39,
    ),
    # a request that left kept the slots of states whose step had not been taken in
    "slots_of_a_step_that_is_late_are_freed_with_their_request": (
        {"kinds": "all", "patience": "short", "compat": "sglang_0_5_23"},
        7,
    ),
    # a chunk that was published when its request left gave the request its states again
    "states_of_a_published_chunk_belong_to_the_tree_alone": (
        {
            "seed": "5075",
            "kinds": "parts",
            "patience": "short",
            "compat": "sglang_0_5_23",
            "pools.swa_device": "0.0",
        },
        1,
    ),
    # where windows are kept for repeats, a run of steps that fills a page freed a page too many
    "a_run_of_steps_frees_the_windows_that_single_steps_free": (
        {
            "seed": "1075",
            "cache.keeps_for_repeats": "True",
            "kinds": "all",
            "talk.longest_answer": "300",
        },
        10,
    ),
    # a prompt that goes back to the queue alone frees memory: the step is planned again
    "a_prompt_that_goes_back_to_an_empty_queue_starts_again": (
        {
            "kinds": "full_swa",
            "talk.gap_s": "0.001",
            "compat": "vllm_0_33",
            "cache.page_size": "2",
            "pools.swa_device": "0.0",
            "pages.scheduler.chunk_tokens": "1",
        },
        7,
    ),
    # a page's length in bytes was taken for that of its tokens, which the tree may know by numbers
    "whoever_waits_for_a_load_of_another_does_so_whatever_names_pages_have": (
        {"seed": "14", "copies": "uneven", "compat": "vllm_0_33", "pools.full_device": "0.8"},
        10,
    ),
    # the explanation of an admission without its hit took the tree's pages for missing
    "a_hit_that_is_given_up_leaves_its_pages_in_the_tree": (
        {"kinds": "parts", "cache.page_size": "1", "pools.swa_device": "0.0"},
        18,
    ),
    # a prompt that found no pages was tried again at once, although copies were freeing some
    "a_prompt_that_finds_no_pages_waits_for_copies_in_progress": (
        {
            "seed": "5124",
            "patience": "long",
            "compat": "sglang_0_5_23",
            "cache.policy": "s3fifo",
            "cache.write_policy": "write_back_watermark",
            "storage.speed": "slow",
        },
        21,
    ),
    # with pages of one token, every second step of an answer freed its window pages
    "single_steps_free_as_many_window_pages_as_a_run_of_steps": (
        {
            "cache.trims_leaves": "False",
            "scheduler.batching": "mixed",
            "kinds": "all",
            "compat": "vllm_0_33",
            "cache.page_size": "1",
            "seam": "votes_of_a_step_ago",
        },
        12,
    ),
    # a state of a leaf was copied to the host again and again: its copy locked the whole leaf
    "a_state_leaves_an_exclusive_device_although_its_pages_stay": (
        {
            "seed": "92",
            "kinds": "full_mamba",
            "compat": "vllm_0_33",
            "pools.slots_device": "4",
            "host.layout": "both",
        },
        30,
    ),
    # a prompt that gave its pages back, with nothing else in progress, was not planned again
    # the step under way was forgotten before the retraction, and its state's slot with it
    "a_retraction_frees_the_state_of_a_step_that_is_not_taken_in": (
        {
            "seed": "781",
            "kinds": "parts",
            "scheduler.batching": "prompts_together",
            "scheduler.asynchronous": "True",
            "scheduler.swa_budget": "no_host_term",
            "cache.page_size": "8",
            "pools.swa_device": "0.0",
        },
        9,
    ),
    "a_prompt_that_gave_its_pages_back_starts_again": (
        {
            "seed": "657",
            "kinds": "all",
            "compat": "vllm_0_33",
            "cache.page_size": "8",
            "pools.swa_device": "0.0",
            "pages.scheduler.chunk_tokens": "1",
            "talk.longest_answer": "300",
        },
        12,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_found_no_more(name: str) -> None:
    choices, limit = FOUND[name]
    try_choices(PLAIN | choices, limit)


# a reader told of its last page alone, so that who looks at every batch saw them between jumps only
BATCHES = {
    "a policy that goes on with a part": (
        {"cache.policy": "tests.fuzz.policies:FirstQuarter", "storage.batch_pages": "1"},
        24,
    ),
    "complete pages that await no window": (
        {"kinds": "full_swa", "compat.quirks.await_sidecars": "False"},
        24,
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_that_is_read_is_told(name: str) -> None:
    choices, limit = BATCHES[name]
    slow = {"workload.start": "warm_storage", "storage.speed": "slow"}
    try_choices(PLAIN | slow | choices, limit)


def test_a_wait_that_goes_on_when_a_request_has_begun_breaks_a_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Prefill, "_end_wait", lambda self, req, now_ns: None)
    slow = {"workload.start": "warm_storage", "storage.speed": "slow"}
    with pytest.raises(
        BrokenLawError, match=r"law 9: request .* still counted as waiting for storage"
    ):
        try_choices(PLAIN | slow, 12)


# an answer that came too late to be heard, and what a stopped reader went on to bring, are no
# part of what a request could have used; reasons said of both that nothing explained them
UNHEARD = {
    "an answer after the ranks had let go": (
        {"parallel.ranks": "2", "workload.arrivals": "closed", "prefetch.stop": "best_effort"},
        9,
    ),
    "pages of a batch that was under way": (
        {
            "seed": "695",
            "cache.page_size": "1",
            "cache.write_policy": "write_back",
            "cache.policy": "tests.fuzz.policies:FirstQuarter",
            "storage.batch_pages": "1",
        },
        14,
    ),
    "a state after nobody waited for it": (
        {
            "kinds": "full_mamba",
            "workload.arrivals": "closed",
            "compat.quirks.await_sidecars": "False",
            "storage.read_workers": "3",
            "storage.delay_s": "0.005",
        },
        22,
    ),
}


@pytest.mark.parametrize("name", UNHEARD)
def test_what_came_after_a_prefetch_was_settled_explains_nothing(name: str) -> None:
    choices, limit = UNHEARD[name]
    try_choices(PLAIN | {"workload.start": "warm_storage"} | choices, limit)
