"""Models of transformers on three tiers: logits are those without a cache, mistakes are found."""

from unittest.mock import patch

import pytest

from hicache.cache.kinds import MAMBA, SWA
from tests.executor.hf_runs import KINDS, arrivals, run

hf_model = pytest.importorskip(
    "hicache.executor.real.hf_model", reason="transformers is not installed", exc_type=ImportError
)


@pytest.mark.parametrize("call", ["page", "step"])
@pytest.mark.parametrize("family", KINDS)
def test_logits_are_those_without_a_cache_with_hits_of_every_kind_from_every_tier(family, call):
    with arrivals() as seen:
        result = run(family, f"executor.call={call}")
    measures = result.measures
    assert all(seen[tier, kind] for tier in ("host", "storage") for kind in KINDS[family]), seen
    assert (measures["verify/checked_count"], measures["verify/untested_count"]) == (40, 0)
    assert (measures["verify/wrong_count"], measures["verify/greedy_agreement"]) == (0, 1)
    if call == "page":
        assert measures["verify/unequal_count"] == 0
    else:
        assert 0 < measures["verify/logit_error_max"] < 3e-5


def writes_no_state():
    return patch("hicache.executor.real.pools.TorchPools.copy_states", lambda *_: None)


def after_init(name, spoil):
    """Spoil a layer of each call that begins behind the first token."""
    layer_type = getattr(hf_model, name)
    init = layer_type.__init__

    def spoiled(self, call, layer, shapes):
        init(self, call, layer, shapes)
        if call.start:
            spoil(self, call, layer)

    return patch.object(layer_type, "__init__", spoiled)


def reads_a_wrong_page():
    def spoil(self, call, layer):
        first = self._first_page
        self._pages[first] = self._pages[first + 1]

    return after_init("PagedLayer", spoil)


def sees_a_window_that_is_one_page_short():
    def spoil(self, call, layer):
        self._first_page += self.is_sliding

    return after_init("PagedLayer", spoil)


def takes_the_taps_of_another_slot():
    def spoil(self, call, layer):
        taps = call.memory.pools.ranks[0].taps[0]
        self._taps = taps[(call.stretch.slot + 1) % len(taps)].view_as(self._taps)

    return after_init("SlotLayer", spoil)


MISTAKES = [
    *((reads_a_wrong_page, family) for family in KINDS),
    *((sees_a_window_that_is_one_page_short, each) for each in KINDS if SWA in KINDS[each]),
    *((writes_no_state, family) for family in KINDS if MAMBA in KINDS[family]),
    *((takes_the_taps_of_another_slot, family) for family in KINDS if MAMBA in KINDS[family]),
]


@pytest.mark.parametrize(("mistake", "family"), MISTAKES)
def test_a_planted_mistake_is_found(mistake, family):
    with mistake():
        measures = run(family, num_requests=12).measures
    assert measures["verify/wrong_count"] > 0
    assert measures["verify/logit_error_max"] > 0.05
