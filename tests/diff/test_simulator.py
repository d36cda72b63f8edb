import numpy as np
import pytest

from experiments.diff.protocol import Outcome, Pools, SideError, Tokens
from experiments.diff.simulator import SimulatorSide, open_side

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


def test_a_probe_sees_what_each_tier_holds_and_changes_nothing() -> None:
    ours = side()
    first = tokens(1, 256)
    admit(ours, 0, first)
    held = ours.probe(first)
    assert held["full/device"] == held["full/host"] == held["full/storage"] == [(0, 256)]
    assert ours.probe(first) == held
    assert ours.probe(first[:40])["full/device"] == [(0, 32)]
    assert ours.probe(tokens(2, 256)) == {}


def test_what_left_the_device_is_seen_and_counted() -> None:
    ours = side()
    first = tokens(1, 256)
    outcomes = [admit(ours, number, tokens(number + 1, 256)) for number in range(4)]
    assert "full/device" not in ours.probe(first)
    assert sum(each.counts.get("evicted/full/device", 0) for each in outcomes) >= 256
    again = admit(ours, 4, first)
    assert sum(again.hits) == 240
    assert again.counts["moved/full/load_back"] == 240


def test_a_delayed_back_up_is_counted_at_once_and_done_when_so_many_requests_have_come() -> None:
    ours = side(copy_delay=2)
    counts = [admit(ours, number, tokens(number + 1, 64)).counts for number in range(4)]
    assert [each.get("moved/full/back_up", 0) for each in counts] == [64, 64, 64, 64]
    assert [each.get("moved/full/write", 0) for each in counts] == [0, 0, 64, 64]


def test_a_load_back_is_done_at_once_with_delayed_back_ups_too() -> None:
    ours = side(copy_delay=2)
    first = tokens(1, 256)
    for number in range(5):
        admit(ours, number, tokens(number + 1, 256))
    assert "full/device" not in ours.probe(first)
    again = admit(ours, 5, first)
    assert sum(again.hits) == again.counts["moved/full/load_back"] == 240
    assert ours.probe(first)["full/device"] == [(0, 256)]


def test_a_state_is_one_token_wide() -> None:
    ours = side(num_states=8)
    first = tokens(1, 64)
    admit(ours, 0, first)
    assert ours.probe(first)["mamba/device"] == [(63, 64)]
    assert admit(ours, 1, tokens(1, 128)).counts["hit/mamba/device"] == 1


def test_a_request_that_does_not_fit_gets_one_sentence() -> None:
    with pytest.raises(SideError, match="the device pools are too small: 800 tokens"):
        admit(side(), 0, tokens(1, 800))


def branches(compat: str, **pools: int) -> list[tuple[int, int, int]]:
    """Hits of four prompts that share 128 tokens and part there, each pushed off the device."""
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


@pytest.mark.parametrize(("compat", "hit"), [("hicache", 320), ("reports", 0)])
@pytest.mark.parametrize(
    "pools", [{"window_len": 32, "swa_tokens": 640}, {"num_states": 12}], ids=["window", "state"]
)
def test_a_branch_off_a_prefix_that_storage_alone_holds_gets_a_window_or_state(
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


def test_full_attention_needs_no_branch() -> None:
    assert branches("reports") == [(0, 0, 0), *[(0, 128, 0)] * 3]


def test_an_answer_of_one_token_ends_when_it_is_told_to() -> None:
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


def test_the_end_of_an_answer_without_a_state_is_no_use_of_its_prompt() -> None:
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
