"""The settings of a run are few, and an experiment, a preset or a page varies each of them."""

import re
from itertools import chain

from hicache.cli.knobs import groups_of, parts_of
from hicache.runs.schema import CONF

MOST_SETTINGS = 136
ROOT = CONF.resolve().parents[0]
# shapes and speeds describe a model and a machine, and not a run
GROUPS = {name: kind for name, kind in groups_of().items() if name not in ("model", "hardware")}
# how a run is reported, watched and repeated; a log, class or deployment of the user's own
OWN = (
    *("tracker.project", "tracker.interval_s", "engine.jump", "engine.check_invariants"),
    *("workload.block_tokens", "workload.odd_rows", "cache.policy_args", "storage.format"),
    *("cache.host.sglang_gib", "parallel.ep", "goodput.times"),
)


def settings_of(group: str) -> list[str]:
    """Return a group's settings, for workloads with those of the kind that has the most."""
    (_, own), *others = parts_of(group, GROUPS[group])
    kinds = [part for heading, part in others if heading.startswith("With ")]
    return [each.name for each in (*own, *max(kinds, key=len, default=()))]


def test_a_run_has_no_more_settings_than_the_limit() -> None:
    at_the_top = ["name", "metrics", "seed", "data_dir"]
    settings = [*at_the_top, *chain.from_iterable(map(settings_of, GROUPS))]
    assert len(settings) <= MOST_SETTINGS, "remove a setting, or add a key to a mapping"


def test_each_setting_is_varied_by_an_experiment_a_preset_or_a_page() -> None:
    places = ("conf/**/*.yaml", "experiments/**/*.yaml", "docs/**/*.md", "README.md")
    files = [path for place in places for path in ROOT.glob(place) if path.name != "knobs.md"]
    text = "\n".join(path.read_text() for path in files)
    every = {
        each.name
        for group, kind in GROUPS.items()
        for _, part in parts_of(group, kind)
        for each in part
        if not each.name.startswith("compat.")
    }
    lone = [
        name
        for name in sorted(every - set(OWN))
        if not re.search(
            rf"\b{re.escape(name)}\b|^ +{name.rpartition('.')[2]}:|^{name.rpartition('.')[2]}:",
            text,
            re.M,
        )
    ]
    assert lone == []
