from experiments.diff.protocol import Pools

SMALL = Pools(device_tokens=400, host_tokens=1000, max_len=200)


def test_pools_give_the_kinds_of_the_model_and_their_units() -> None:
    assert SMALL.components == ("full",)
    both = Pools(
        device_tokens=400, host_tokens=1000, max_len=200, window_len=1, swa_tokens=9, num_states=1
    )
    assert both.components == ("full", "swa", "mamba")
    assert (both.unit("full"), both.unit("swa"), both.unit("mamba")) == (64, 64, 1)
    assert both.host_ratio == 2.5
    assert (SMALL.has_storage, SMALL.num_running, SMALL.copy_delay) == (True, 4, 0)
    assert not SMALL.is_eventful


def test_the_error_of_too_small_pools_names_all_that_takes_room() -> None:
    assert str(SMALL.too_small(1234)) == (
        "the device pools are too small: 1,234 tokens of one request and what 3 others hold do not"
        " fit 400 tokens"
    )
    all_of_it = Pools(
        device_tokens=4000, host_tokens=0, max_len=200, window_len=8, swa_tokens=1600,
        num_states=7, num_running=2, copy_delay=8,
    )  # fmt: skip
    assert str(all_of_it.too_small(5)) == (
        "the device pools are too small: 5 tokens of one request and what 1 others hold or back-ups"
        " of 8 requests lock do not fit 4,000 tokens, 1,600 tokens of windows, 7 states"
    )
