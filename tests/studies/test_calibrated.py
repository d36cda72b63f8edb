"""`hicache calibrate` on servers whose constants are known."""

import pytest

from experiments.studies import calibrated
from hicache.results import calibration


def test_the_constants_of_a_drawn_server_are_found_within_five_percent():
    assert calibrated.draw(2) == pytest.approx(dict.fromkeys(calibrated.CONSTANTS, 1), abs=0.05)


@pytest.mark.parametrize(
    ("lacks", "unknown"),
    [
        ("pairs", "scheduler.begin_s"),
        pytest.param("hits", "hardware.link_factor", marks=pytest.mark.soak),
        ("lengths", "hardware.prefill_factor"),
    ],
)
def test_a_log_that_lacks_information_is_refused(lacks, unknown, monkeypatch):
    monkeypatch.setattr(calibration, "MOST_REQUESTS", 100)  # enough, as the last test shows
    with pytest.raises(ValueError, match=f"does not identify .*{unknown}"):
        calibrated.draw(2, lacks=lacks)


def test_half_of_the_requests_of_a_complete_log_are_enough(monkeypatch):
    monkeypatch.setattr(calibration, "MOST_REQUESTS", 100)
    assert calibrated.draw(2).keys() == set(calibrated.CONSTANTS)
