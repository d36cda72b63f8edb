import json
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from itertools import zip_longest

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hicache.cli.knobs import help_of
from hicache.config import (
    STOP_POLICIES,
    DeadlineFrom,
    ExperimentConfig,
    StageAt,
    WandbMode,
    inert_knobs,
)
from hicache.models import ModelConfig
from hicache.results.keys import KNOWN
from hicache.runs import schema
from hicache.runs.errors import meant, sentence
from hicache.runs.schema import CONF, register
from tests.models.texts import LLAMA_8B

OPTIONS = {
    folder.name: sorted(f"{folder.name}={path.stem}" for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "experiment"  # those are composed below
}
# composing takes a good while: one option of each group at a time, until all have had their turn
TURNS = [[each for each in turn if each is not None] for turn in zip_longest(*OPTIONS.values())]
PLAIN_GROUPS = ["parallel", "cache", "prefetch", "scheduler", "executor", "engine", "tracker"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    register()


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def load(*overrides) -> ExperimentConfig:
    return schema.config_of.__wrapped__(*overrides)  # the environment may be another one


# what a file leaves for the user to say
TO_SAY = {
    "model=from_hf": ("model.from_hf={folder}/config.json",),
    "workload=trace": ("workload.path=trace.jsonl",),
}


@pytest.mark.parametrize("options", TURNS, ids=" ".join)
def test_every_file_in_conf_composes(options, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    said = [each.format(folder=tmp_path) for option in options for each in TO_SAY.get(option, ())]
    load(*options, *said)


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_asks_a_question_and_carries_its_name(path):
    text = path.read_text()
    assert "# Question:" in text
    assert "?" in text
    assert f"experiment={path.stem}" in text or "python -m experiments." in text
    config = load(f"experiment={path.stem}")
    assert config.name == path.stem
    assert set(config.metrics) - KNOWN == set()


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload=agents", "storage=slab", "cache.policy=fifo", "arm=cut_on", "seed=3"),
        ("compat=sglang_0_5_23", "prefetch.stage_at=enqueue", "name='a b'"),
        ("storage.faults={error_rate: 0.1}", "cache.policy_args={patience: 2}", "hydra.job.num=1"),
    ],
)
def test_setting_values_in_what_was_composed_before_comes_to_the_same(overrides):
    assert load(*overrides) == schema.to_config(composed(*overrides))


@pytest.mark.parametrize("override", ["cache.typo=1", "cache.page_size=many", "cache.host_gib=1,2"])
def test_it_is_refused_in_the_same_words(override):
    told = []
    for way in (load, composed):
        with pytest.raises(HydraException) as caught:
            way(override)
        told.append(sentence(caught.value))
    assert told[0] == told[1]


def test_every_field_of_the_config_is_a_group():
    groups = [
        item.name
        for item in fields(ExperimentConfig)
        if isinstance(item.type, type) and is_dataclass(item.type)
    ]
    listed = [
        next(iter(entry))
        for entry in OmegaConf.load(CONF / "config.yaml").defaults
        if not isinstance(entry, str)
    ]
    assert sorted(listed[: len(groups)]) == sorted(groups)


@pytest.mark.parametrize("group", PLAIN_GROUPS)
def test_defaults_of_the_command_line_are_those_of_the_dataclass(group):
    kinds = {item.name: item.type for item in fields(ExperimentConfig)}
    assert getattr(load("workload=chat"), group) == kinds[group]()  # builtin brings a host


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        load().seed = 1


def test_compat_sets_its_choices_together():
    later = load("compat=sglang_0_5_23")
    assert later.prefetch.stage_at is StageAt.hit
    assert later.prefetch.deadline_from is DeadlineFrom.first_poll
    assert later.scheduler.swa_budget == "sglang_0_5_23"


def test_compat_with_vllm_is_about_pages_and_answers():
    knobs = load("compat=vllm_0_33").cache
    assert knobs.trims_leaves
    assert not knobs.backs_up_answers
    assert knobs.loads_last_page
    assert knobs.keeps_for_repeats


def test_a_single_knob_beats_the_preset():
    config = load("prefetch.stage_at=enqueue", "compat=sglang_0_5_23")
    assert config.prefetch.stage_at is StageAt.enqueue
    assert config.prefetch.deadline_from is DeadlineFrom.first_poll


def test_the_wandb_mode_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert load().tracker.wandb_mode is WandbMode.disabled


def test_the_data_directory_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("HICACHE_DATA", "somewhere")
    assert load().data_dir == "somewhere"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("cache.pagesize=8", "did you mean cache.page_size?"),
        ("cach.page_size=8", "did you mean cache.page_size?"),
        ("cache.foo=1", "Key 'foo' not in 'CacheConfig'"),
        ("cache.page_size=many", "cache.page_size=many"),
        ("prefetch.cut=never", "expected one of [abandon, fit, restorable]"),
        (
            "storage=nope",
            "expected one of file, memory, mooncake, mooncake_rdma, mooncake_tcp, none, nvme, "
            "redis, slab",
        ),
        ("cache.page_size", "cannot parse cache.page_size: expected KEY=VALUE"),
        ("name=~/x", "cannot parse name=~/x: expected KEY=VALUE; quote a value"),
        ("name=a (copy)", "cannot parse name=a (copy): expected KEY=VALUE; quote a value"),
    ],
)
def test_a_typo_is_refused_in_one_sentence(override, told):
    with pytest.raises(HydraException) as caught:
        composed(override)
    assert told in sentence(caught.value)
    assert "\n" not in sentence(caught.value)


def test_a_plus_does_not_make_a_new_knob():
    with pytest.raises(ValueError, match=r"unknown knob cache\.typo"):
        load("+cache.typo=8")


def test_a_bad_value_names_its_knob():
    with pytest.raises(ValueError, match=r"cache\.page_size must be a power of two, got 24"):
        load("cache.page_size=24")


def test_a_missing_value_names_its_knob():
    with pytest.raises(ValueError, match=r"missing value: set workload\.kind"):
        load("workload.kind=???")


def test_a_stop_policy_that_there_is_not_is_refused_before_anything_runs():
    told = f"prefetch.stop must be one of {', '.join(STOP_POLICIES)}"
    with pytest.raises(ValueError, match=re.escape(f"{told}, got 'never'")):
        load("prefetch.stop=never")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("cache.host_gib=inf", "cache.host_gib must be a finite number, got inf"),
        ("cache.device_gib=nan", "cache.device_gib must be a finite number, got nan"),
        ("prefetch.timeout_base_s=nan", "prefetch.timeout_base_s must be a finite number, got nan"),
        ("prefetch.occupied_share=nan", "prefetch.occupied_share must be a finite number, got nan"),
        ("prefetch.occupied_share=2", "prefetch.occupied_share must be between 0 and 1, got 2"),
        ("workload.load=inf", "workload.load must be a finite number, got inf"),
        ("workload.warm_up_s=-1", "workload.warm_up_s must be at least 0, got -1"),
        ("tracker.interval_s=0", "tracker.interval_s must be at least 0.001, got 0"),
        ("tracker.interval_s=-5", "tracker.interval_s must be at least 0.001, got -5"),
        ("cache.load_back_threshold=-100", "cache.load_back_threshold must be at least 0"),
        ("seed=-1", "seed must be at least 0, got -1"),
        (
            "name=../../evil",
            "name must be a relative path without `..`, below outputs/, got '../../evil'",
        ),
        ("name=/evil", "name must be a relative path without `..`, below outputs/, got '/evil'"),
        (
            "parallel.tp=3",
            "parallel.tp must divide the 8 KV heads of gpt_oss_120b or be a multiple",
        ),
    ],
)
def test_a_value_that_means_nothing_is_refused(override, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        load(override)


def test_heads_of_full_and_of_window_layers_are_dealt_each_by_their_own_number():
    fields = {"name": "both", "num_full_layers": 1, "num_swa_layers": 1, "window_len": 64}
    heads = {"num_query_heads": 12, "num_kv_heads": 4, "swa_num_kv_heads": 12, "hidden_size": 768}
    sizes = {"head_dim": 64, "dense_params": 4_000_000, "head_params": 768_000}
    config = load("parallel.tp=4")
    model = ModelConfig(**fields, **heads, **sizes)
    assert replace(config, model=model).tp == 4
    with pytest.raises(ValueError, match="must divide the 4 KV heads of both"):
        replace(config, model=model, parallel=replace(config.parallel, tp=6))
    with pytest.raises(ValueError, match="must divide the 12 KV heads of both"):
        replace(config, model=model, parallel=replace(config.parallel, tp=8))


def test_a_model_has_its_default_devices_or_all_that_the_machine_has():
    assert [load("model=qwen3_32b", f"hardware={name}").tp for name in ("h200", "h100")] == [16, 8]
    assert load("model=qwen3_32b", "hardware=h100", "parallel.tp=4").tp == 4


def test_latent_kv_has_no_heads_to_deal():
    assert load("model=kimi_linear_48b", "parallel.tp=3").parallel.tp == 3


def test_a_page_longer_than_the_grid_of_states_names_both_where_there_is_such_a_grid():
    told = "cache.checkpoint_tokens=8192 must be a multiple of cache.page_size=16384"
    with pytest.raises(ValueError, match=re.escape(told)):
        load("cache.page_size=16384", "cache.checkpoints=every")
    assert load("cache.page_size=16384").cache.page_size == 16384


@pytest.mark.parametrize(
    ("overrides", "is_inert"),
    [((), True), (("cache.checkpoints=every",), False), (("cache.windows=every",), False)],
)
def test_a_knob_that_several_choices_use_has_an_effect_with_each(overrides, is_inert):
    inert = inert_knobs(load("model=qwen3_next_80b", *overrides))
    assert ("cache.checkpoint_tokens" in inert) is is_inert


def test_a_knob_takes_its_option_for_granted_unless_one_is_typed():
    assert schema.with_implied(["-m", "model.from_hf=x", "seed=0,1"]) == [
        "-m",
        "model.from_hf=x",
        "seed=0,1",
        "model=from_hf",
    ]
    assert schema.with_implied(["experiment=sizing", "model.from_hf=x"])[2:] == ["model=from_hf"]
    for typed in ("workload=mooncake_conversation", "experiment=prefetch_stop"):
        assert schema.with_implied(["workload.path=x", typed]) == ["workload.path=x", typed]


def test_settings_are_not_similar_because_their_group_is_the_same():
    assert meant("cache.foo", ["cache.pools", "cache.page_size"]) == ""
    assert meant("cache.pool", ["cache.pools", "cache.page_size"]) == " (did you mean cache.pools?)"
    assert meant("explian", ["explain", "run"]) == " (did you mean explain?)"


def test_the_help_says_what_each_experiment_asks():
    lines = help_of([]).splitlines()
    asked = [line for line in lines if line.endswith("?")]
    assert len(asked) == len(list((schema.CONF / "experiment").glob("*.yaml")))
    assert any(line.split()[:2] == ["sizing", "how"] for line in asked)
