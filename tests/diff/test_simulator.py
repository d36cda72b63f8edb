import numpy as np
import pytest

from experiments.diff.pages import page_names
from experiments.diff.protocol import Outcome, Pools, SideError, Tokens
from experiments.diff.simulator import SimulatorSide, config_for, open_side, spans_of

PAGE = 16


def side(compat: str = "sglang_0_5_23", **changes: int) -> SimulatorSide:
    sizes = {"device_tokens": 640, "host_tokens": 1280, "max_len": 640, "num_running": 1}
    pools = Pools(page_size=PAGE, **{**sizes, **changes})  # type: ignore[arg-type]
    return open_side(pools, {"compat": compat})


def tokens(name: int, count: int) -> Tokens:
    return np.arange(name * 10_000, name * 10_000 + count + 1, dtype=np.int32)


def admit(ours: SimulatorSide, number: int, each: Tokens) -> Outcome:
    if number:
        ours.finish(number - 1)
    return ours.admit(number, each, len(each) - 1)


def test_a_probe_returns_what_each_tier_holds_and_changes_nothing() -> None:
    ours = side()
    first = tokens(1, 256)
    admit(ours, 0, first)
    held = ours.probe(first)
    assert held["full/device"] == held["full/host"] == held["full/storage"] == [(0, 256)]
    assert ours.probe(first) == held
    assert ours.probe(first[:40])["full/device"] == [(0, 32)]
    assert ours.probe(tokens(2, 256)) == {}


def test_evicted_and_loaded_back_tokens_are_counted() -> None:
    ours = side()
    first = tokens(1, 256)
    outcomes = [admit(ours, number, tokens(number + 1, 256)) for number in range(4)]
    assert "full/device" not in ours.probe(first)
    assert sum(each.counts.get("evicted/full/device", 0) for each in outcomes) >= 256
    again = admit(ours, 4, first)
    assert sum(again.hits) == 240
    assert again.counts["moved/full/load_back"] == 240


KEPT = {"full": 400, "swa": 48, "mamba": 1}  # of a prompt of 400 tokens: a window and a page


@pytest.mark.parametrize(
    ("kinds", "pools"),
    [
        (("full",), {}),
        (("full", "swa"), {"window_len": 32, "swa_tokens": 640}),
        (("full", "mamba"), {"num_states": 6}),
        (("full", "swa", "mamba"), {"window_len": 32, "swa_tokens": 640, "num_states": 6}),
    ],
)
def test_pages_that_only_storage_holds_are_read_and_counted_by_kind(
    kinds: tuple[str, ...], pools: dict[str, int]
) -> None:
    ours = side(**pools)
    first = tokens(1, 400)
    for number in range(7):
        outcome = admit(ours, number, tokens(number + 1, 400))
    wanted = {}
    for kind in kinds:
        moves = ("evicted/{}/device", "evicted/{}/host", "moved/{}/back_up", "moved/{}/write")
        wanted |= {name.format(kind): KEPT[kind] for name in moves}
    assert outcome.counts == wanted
    places = {"device": 1, "host": 3, "storage": 7}  # prompts that each tier has room for
    assert outcome.held == {
        f"{kind}/{tier}": KEPT[kind] * count for kind in kinds for tier, count in places.items()
    }
    spans = {"full": (0, 400), "swa": (352, 400), "mamba": (399, 400)}
    assert ours.probe(first) == {f"{kind}/storage": [spans[kind]] for kind in kinds}
    # 40 tokens more: two whole pages are computed and written
    outcome = admit(ours, 7, np.concatenate([first[:400], tokens(90, 40)]))
    assert tuple(outcome.hits) == (0, 0, 400)
    assert outcome.admission == "admitted"
    used = {"full": 400, "swa": 32, "mamba": 1}
    added = {"full": 32, "swa": 32, "mamba": 1}
    for kind in kinds:
        counts = outcome.counts
        assert counts[f"moved/{kind}/read"] == used[kind]
        assert counts[f"moved/{kind}/back_up"] == counts[f"moved/{kind}/write"] == added[kind]
        loaded = 2 if kind == "mamba" else used[kind]  # a state for the tree, one for the request
        assert counts[f"moved/{kind}/load_back"] == loaded
        assert kind == "full" or counts[f"hit/{kind}/storage"] == used[kind]


def test_pages_that_storage_has_are_not_written_again() -> None:
    ours = side(host_tokens=640)
    first = tokens(1, 400)
    for number in range(3):
        admit(ours, number, tokens(number + 1, 400))
    outcome = admit(ours, 3, first[:250])  # shorter than what a read needs
    assert outcome.counts["moved/full/back_up"] == 240
    assert "moved/full/write" not in outcome.counts
    assert outcome.held["full/storage"] == 1200


def test_the_config_of_the_simulator_has_the_sizes_of_the_pools() -> None:
    pools = Pools(
        page_size=16, device_tokens=640, host_tokens=1600, max_len=320, window_len=32,
        swa_tokens=320, num_states=6,
    )  # fmt: skip
    for options, more in (({}, 1), ({"compat": "reports"}, 0), ({"compat": "vllm_0_33"}, 0)):
        config = config_for(pools, options)
        cache = config.cache
        # the host's pools are 2.5 times as large, in whole pages, and SGLang's a page larger
        assert (cache.device.tokens["full"], cache.host.tokens["full"]) == (640, 1600 + 16 * more)
        assert (cache.device.tokens["swa"], cache.host.tokens["swa"]) == (320, 800 + 16 * more)
        assert (cache.device.states, cache.host.states) == (6, 15 + more)
        assert (cache.page_size, cache.device_gib, config.model.window_len) == (16, None, 32)
        assert (config.model.max_len, config.scheduler.chunk_tokens) == (320 + 16, 8192)
        assert (config.compat.rules.clip_new_tokens, config.scheduler.new_token_ratio) == (320, 0)
        assert (config.prefetch.stop, config.storage.kind) == ("wait_complete", "memory")
    full = Pools(device_tokens=640, host_tokens=0, max_len=320, has_storage=False)
    config = config_for(full, {"eviction": "lfu", "write_policy": "write_back"})
    assert (config.storage.kind, config.cache.host.tokens["full"]) == ("none", 0)
    assert (config.cache.policy, config.cache.write_policy) == ("lfu", "write_back")
    assert ("swa" in config.cache.device.tokens, config.cache.device.states) == (False, None)


def test_a_refused_config_is_an_error_of_the_side() -> None:
    with pytest.raises(SideError, match=r"cache\.eviction.* got luck|luck"):
        open_side(Pools(device_tokens=640, host_tokens=0, max_len=320), {"eviction": "luck"})


def test_the_simulator_reports_its_name_and_its_policies() -> None:
    pools = Pools(device_tokens=640, host_tokens=0, max_len=320)
    ours = open_side(pools, {"eviction": "lfu", "write_policy": "write_back"})
    assert ours.about() == {
        "engine": "hicache",
        "version": "this checkout",
        "eviction": "lfu",
        "write_policy": "write_back",
        "aborts": "yes",
    }
    assert side().about()["eviction"] == "lru"
    assert side().about()["write_policy"] == "write_through"


@pytest.mark.parametrize(
    ("ids", "starts", "counts"),
    [
        ([5, 6, 7, 9, 3, 4, 4], [5, 9, 3, 4], [3, 1, 2, 1]),
        ([0], [0], [1]),
        ([2, 1], [2, 1], [1, 1]),
    ],
)
def test_tokens_are_stored_as_spans_of_consecutive_ids(
    ids: list[int], starts: list[int], counts: list[int]
) -> None:
    spans = spans_of(np.array(ids, np.int32))
    assert (spans.starts.tolist(), spans.counts.tolist()) == (starts, counts)
    assert spans.starts.dtype == spans.counts.dtype == np.int32


def test_a_delayed_back_up_is_counted_at_once_and_written_after_later_requests() -> None:
    ours = side(copy_delay=2)
    counts = [admit(ours, number, tokens(number + 1, 64)).counts for number in range(4)]
    assert [each.get("moved/full/back_up", 0) for each in counts] == [64, 64, 64, 64]
    assert [each.get("moved/full/write", 0) for each in counts] == [0, 0, 64, 64]


def test_a_load_back_is_done_at_once_even_if_back_ups_are_delayed() -> None:
    ours = side(copy_delay=2)
    first = tokens(1, 256)
    for number in range(5):
        admit(ours, number, tokens(number + 1, 256))
    assert "full/device" not in ours.probe(first)
    again = admit(ours, 5, first)
    assert sum(again.hits) == again.counts["moved/full/load_back"] == 240
    assert ours.probe(first)["full/device"] == [(0, 256)]


def test_a_state_is_reported_as_one_token_wide() -> None:
    ours = side(num_states=8)
    first = tokens(1, 64)
    admit(ours, 0, first)
    assert ours.probe(first)["mamba/device"] == [(63, 64)]
    assert admit(ours, 1, tokens(1, 128)).counts["hit/mamba/device"] == 1


def test_a_request_that_does_not_fit_is_refused_in_one_sentence() -> None:
    with pytest.raises(SideError, match="the device pools are too small: 800 tokens"):
        admit(side(), 0, tokens(1, 800))


def branches(compat: str, **pools: int) -> list[tuple[int, int, int]]:
    """Hits of four prompts that branch after 128 tokens; each is evicted before the next."""
    ours = side(compat, **pools)
    shared = tokens(1, 128)[:128]
    hits = []
    for number in range(4):
        branch = np.concatenate([shared, tokens(10 + number, 64)])
        hits.append(tuple(admit(ours, 2 * number, branch).hits))
        admit(ours, 2 * number + 1, tokens(20 + number, 600))
    return hits


@pytest.mark.parametrize(
    "pools", [{"window_len": 32, "swa_tokens": 640}, {"num_states": 12}], ids=["window", "state"]
)
@pytest.mark.parametrize("compat", ["sglang_0_5_23", "reports"])
def test_a_window_or_state_at_a_branch_is_backed_up(compat: str, pools: dict[str, int]) -> None:
    # the second prompt finds out where it leaves the first, whose KV is on the host by then
    assert branches(compat, **pools) == [(0, 0, 0), (0, 0, 0), (0, 128, 0), (0, 128, 0)]


@pytest.mark.parametrize(
    ("compat", "hit"), [("hicache", 320), ("reports", 320), ("sglang_0_5_23", 0)]
)
@pytest.mark.parametrize(
    "pools", [{"window_len": 32, "swa_tokens": 640}, {"num_states": 12}], ids=["window", "state"]
)
def test_a_window_or_state_is_kept_at_a_branch_off_a_prefix_that_only_storage_holds(
    compat: str, hit: int, pools: dict[str, int]
) -> None:
    ours = side(compat, **pools)
    shared = tokens(1, 320)[:320]
    hits = []
    for number in range(0, 12, 4):
        branch = np.concatenate([shared, tokens(10 + number, 256)])
        hits.append(sum(admit(ours, number, branch).hits))
        for more in (1, 2, 3):  # pushes it off device and host
            admit(ours, number + more, tokens(20 + number + more, 600))
    assert hits == [0, 0, hit]


def test_full_attention_alone_hits_at_the_first_repetition_of_a_branch() -> None:
    assert branches("reports") == [(0, 0, 0), *[(0, 128, 0)] * 3]


def test_locks_free_memory_and_pages_are_reported_in_the_state() -> None:
    ours = side(num_running=3)
    first = tokens(1, 256)
    branch = np.concatenate([first[:128], tokens(2, 64)])
    names = page_names(first[:240], PAGE)
    outcome = ours.admit(0, first, 255)
    assert outcome.state == {
        "locked/full/device": 240,
        "locked/full/host": 0,
        "pages/full/device": sum(names) % (1 << 64),
        "pages/full/host": sum(names) % (1 << 64),
        "free/full/device": 640 - 256,  # its last page is not in the tree yet
    }
    names += page_names(branch[:192], PAGE)[8:]
    outcome = ours.admit(1, branch, 192)
    # the nodes of the shared 128 tokens are locked by both requests
    assert outcome.state["locked/full/device"] == 128 + 240 + 64
    assert outcome.state["pages/full/device"] == sum(names) % (1 << 64)
    ours.finish(0)
    assert ours.admit(2, tokens(3, 32), 32).state["locked/full/device"] == 192 + 32


def test_only_the_last_pages_of_a_window_and_the_last_state_are_locked() -> None:
    first = tokens(1, 256)
    names = page_names(first[:240], PAGE)
    windowed = side(window_len=32, swa_tokens=640, num_running=2)
    state = windowed.admit(0, first, 255).state
    assert (state["locked/full/device"], state["locked/swa/device"]) == (240, 32)
    assert state["pages/swa/device"] == state["pages/swa/host"] == sum(names[-2:]) % (1 << 64)
    assert (state["free/full/device"], state["free/swa/device"]) == (384, 592)
    with_states = side(num_states=8, num_running=2)
    state = with_states.admit(0, first, 255).state
    assert (state["locked/full/device"], state["locked/mamba/device"]) == (240, 1)
    assert state["pages/mamba/device"] == names[-1]
    assert state["pages/mamba/host"] == names[-1]
    assert state["free/mamba/device"] < 8


def test_locks_on_the_host_are_not_reported_during_back_ups() -> None:
    ours = side(copy_delay=2)
    assert "locked/full/host" not in admit(ours, 0, tokens(1, 64)).state
    assert "locked/full/device" in admit(ours, 1, tokens(2, 64)).state


def test_an_answer_of_one_token_runs_until_finish_is_called() -> None:
    ours = side(num_running=2)
    ours.admit(0, tokens(1, 64), 64)
    assert [req.request.id for req in ours.engine.scheduler.running] == [0]
    ours.admit(1, tokens(2, 64), 64)
    ours.finish(0)
    assert [req.request.id for req in ours.engine.scheduler.running] == [1]


@pytest.mark.parametrize(
    ("compat", "hits"), [("vllm_0_33", (48, 16, 0)), ("sglang_0_5_23", (48, 0, 0))]
)
def test_vllm_loads_the_last_page_of_a_prompt_of_whole_pages(
    compat: str, hits: tuple[int, int, int]
) -> None:
    ours = side(compat, has_storage=False)
    assert admit(ours, 0, tokens(1, 64)).hits == (0, 0, 0)
    again = admit(ours, 1, tokens(1, 64))
    assert again.hits == hits
    assert again.counts.get("moved/full/load_back", 0) == hits[1]


def test_only_the_request_that_finishes_decodes() -> None:
    ours = side(num_running=2)
    for number in range(2):
        ours.admit(number, tokens(number, 100), 64)
    ours.finish(1)
    (left,) = ours.engine.scheduler.running
    assert (left.request.id, left.decoded) == (0, 1)


def test_the_end_of_an_answer_without_a_state_does_not_refresh_its_prompt() -> None:
    ours = side(num_states=12, num_running=2)
    for number in range(2):
        ours.admit(number, tokens(number, 65), 64)
    ours.finish(0)
    first, second = sorted(ours.engine.cache.tree.nodes(), key=lambda node: node.created)
    assert first.tick < second.tick


def test_a_state_on_the_host_is_loaded_twice_as_in_sglang() -> None:
    loaded = {}
    for compat in ("sglang_0_5_23", "reports"):
        ours = side(compat, num_states=8)
        first = tokens(1, 64)
        for number in range(3):
            admit(ours, number, tokens(1 + number, 512) if number else first)
        outcome = admit(ours, 3, np.concatenate([first[:64], tokens(9, 64)]))
        assert outcome.counts["hit/mamba/host"] == 1
        loaded[compat] = outcome.counts["moved/mamba/load_back"]
    assert loaded == {"sglang_0_5_23": 2, "reports": 1}


@pytest.mark.parametrize(("compat", "hit"), [("sglang_0_5_23", 0), ("reports", 272)])
def test_a_short_read_below_a_node_is_used_unless_it_brings_no_window(
    compat: str, hit: int
) -> None:
    pools = {"device_tokens": 1024, "host_tokens": 2048, "swa_tokens": 1024, "max_len": 1024}
    ours = side(compat, window_len=320, **pools)
    shared = tokens(0, 320)[:320]
    first = np.concatenate([shared, tokens(1, 288)])
    other = np.concatenate([shared, tokens(3, 288)])
    admit(ours, 0, first)
    admit(ours, 1, other)
    for number in range(2, 18, 2):
        admit(ours, number, tokens(10 + number, 320))
        admit(ours, number + 1, other)
    outcome = admit(ours, 18, first)
    assert outcome.hits.storage == hit
    assert sum(outcome.hits) == 320 + hit


@pytest.mark.parametrize("pools", [{"window_len": 32, "swa_tokens": 640}, {"num_states": 6}])
def test_blocks_of_all_kinds_have_the_same_size_in_vllm(pools: dict[str, int]) -> None:
    kinds = side("vllm_0_33", has_storage=0, **pools)._tree.kinds
    assert len({kinds.page_bytes[kind] for kind in kinds.numbers}) == 1


def free_of(ours: SimulatorSide, each: Tokens, stage: str) -> tuple[int, int]:
    """Tokens on the device that the tree holds, and free ones, after the request is aborted."""
    outcome = ours.admit(1, each, len(each) - 1, stage)
    return outcome.held["full/device"], outcome.state["free/full/device"]


def test_a_request_that_is_aborted_in_a_chunk_keeps_earlier_chunks_cached() -> None:
    ours = side(chunk_tokens=64)
    assert free_of(ours, tokens(1, 200), "chunk") == (64, 640 - 64)
    assert not ours.engine.scheduler.running
    # one chunk is the whole prompt
    assert free_of(side(), tokens(1, 200), "chunk") == (192, 640 - 192)


def test_a_request_that_is_aborted_while_it_decodes_keeps_half_of_its_answer() -> None:
    ours = side(abort_seed=1)
    ours.admit(0, tokens(1, 200), 64)  # an answer of 137 tokens, of which the 69th is not computed
    ours.abort(0)
    assert free_of(ours, tokens(2, 1), "queued") == (128, 640 - 128)


@pytest.mark.parametrize("stage", ["queued", "prefetching"])
def test_an_aborted_wait_for_storage_leaves_nothing_and_evicts_once_it_has_host_pages(
    stage: str,
) -> None:
    ours = side()
    first = tokens(1, 400)
    for number in range(7):
        before = admit(ours, number, tokens(number + 1, 400))
    ours.finish(6)
    outcome = ours.admit(7, first, 400, stage)
    held = {name: before.held[name] - outcome.held[name] for name in before.held}
    assert held == {
        "full/device": 0,
        "full/host": 400 * (stage == "prefetching"),
        "full/storage": 0,
    }
    assert outcome.counts == ({"evicted/full/host": 400} if stage == "prefetching" else {})
    assert sum(ours.admit(8, first, 400).hits) == 384
