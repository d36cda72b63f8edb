"""`hicache calibrate` on servers whose constants are known."""

import pytest

from experiments.studies import calibrated


def test_the_constants_of_a_random_server_are_found_within_five_percent():
    assert calibrated.draw(2) == pytest.approx(dict.fromkeys(calibrated.CONSTANTS, 1), abs=0.05)


@pytest.mark.parametrize(
    ("lacks", "unknown"),
    [
        ("pairs", "scheduler.begin_s"),
        pytest.param("hits", "hardware.link_factor", marks=pytest.mark.soak),
        pytest.param("lengths", "hardware.prefill_factor", marks=pytest.mark.soak),
    ],
)
def test_a_log_that_does_not_identify_a_constant_is_refused_with_its_name(lacks, unknown):
    with pytest.raises(ValueError, match=f"does not identify .*{unknown}"):
        calibrated.draw(2, lacks=lacks)
