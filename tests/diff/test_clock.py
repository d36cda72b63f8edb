import pytest

from experiments.diff.sglang.clock import Clock, Event


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "now", 5)
    monkeypatch.setattr(Clock, "delay", 3)


def recorded() -> Event:
    event = Event()
    event.record()
    return event


def test_a_copy_is_done_after_a_delay_counted_in_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    event = recorded()
    for now, is_done in ((5, False), (7, False), (8, True), (9, True)):
        monkeypatch.setattr(Clock, "now", now)
        assert event.query() == is_done
    assert Event().query()  # nothing was recorded


def test_a_load_back_is_done_at_once_and_later_copies_are_delayed() -> None:
    # a load-back that is not done before its prefill ends the engine
    with Clock.at_once():
        load_back = recorded()
    with pytest.raises(ValueError, match="it fails"), Clock.at_once():
        raise ValueError("it fails")
    assert load_back.query()
    assert not recorded().query()
