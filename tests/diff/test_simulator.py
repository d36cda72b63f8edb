import numpy as np
import pytest

from experiments.diff.protocol import Outcome, Pools, SideError, Tokens
from experiments.diff.simulator import SimulatorSide, open_side

PAGE = 16


def side(**changes: int) -> SimulatorSide:
    sizes = {"device_tokens": 640, "host_tokens": 1280, "max_len": 640, "num_running": 1}
    return open_side(Pools(page_size=PAGE, **{**sizes, **changes}), {})  # type: ignore[arg-type]


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


def test_a_delayed_copy_is_done_when_so_many_requests_have_come() -> None:
    ours = side(copy_delay=2)
    moved = [
        admit(ours, number, tokens(number + 1, 64)).counts.get("moved/full/back_up", 0)
        for number in range(4)
    ]
    assert moved == [0, 0, 64, 64]


def test_a_state_is_one_token_wide() -> None:
    ours = side(num_states=8)
    first = tokens(1, 64)
    admit(ours, 0, first)
    assert ours.probe(first)["mamba/device"] == [(63, 64)]
    assert admit(ours, 1, tokens(1, 128)).counts["hit/mamba/device"] == 1


def test_a_request_that_does_not_fit_gets_one_sentence() -> None:
    with pytest.raises(SideError, match="the device pools are too small: 800 tokens"):
        admit(side(), 0, tokens(1, 800))
