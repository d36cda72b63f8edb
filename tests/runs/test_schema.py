"""Configs that are composed of files of conf/ and overrides, and the values that are refused."""

import json
import pickle
import re
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from hicache.cli.knobs import help_of
from hicache.config import GROUPS, STOP_POLICIES, ExperimentConfig, StageAt
from hicache.knob import inert_knobs
from hicache.models import ModelConfig
from hicache.policies.routing import ROUTERS
from hicache.results.keys import KNOWN
from hicache.rules import DeadlineFrom
from hicache.runs import schema
from hicache.runs.errors import meant, sentence
from hicache.runs.schema import CONF, register
from tests.models.texts import LLAMA_8B

# models and arms hold values only, so that they are merged as Hydra does it, without composing
MERGED = [
    path
    for path in sorted([*CONF.glob("model/*.yaml"), *CONF.glob("arm/*.yaml")])
    if path.stem != "from_hf"
]
OPTIONS = [
    sorted(f"{folder.name}={path.stem}" for path in folder.glob("*.yaml") if path not in MERGED)
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "experiment"  # those are composed below
]
# composing takes long: one option of each group at a time, until all have had their turn
TURNS = [[each for each in turn if each is not None] for turn in zip_longest(*OPTIONS)]
# settings that a file leaves to the user
TO_SAY = {
    "model=from_hf": ["model.from_hf={folder}/config.json"],
    "workload=trace": ["workload.path=trace.jsonl"],
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    register()


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def load(*overrides):
    return schema.config_of.__wrapped__(*overrides)  # the environment may be another one


@pytest.mark.parametrize("options", TURNS, ids=" ".join)
def test_every_file_in_conf_composes_to_a_valid_config(options, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    said = [each.format(folder=tmp_path) for option in options for each in TO_SAY.get(option, ())]
    load(*options, *said)


@pytest.mark.parametrize("path", MERGED, ids=lambda path: path.stem)
def test_every_model_and_every_arm_has_values_of_the_schema(path):
    config, values = pickle.loads(schema._composed()), OmegaConf.load(path)
    has_package = path.read_text().startswith("# @package _global_\n")
    if path.parent.name == "model":
        assert not has_package
        assert values.pop("defaults") == ["schema", "_self_"]
        config.model = OmegaConf.merge(schema._writable(ModelConfig), values)
    else:
        assert has_package
        assert "defaults" not in values
        config.merge_with(values)
    schema.to_config(config)


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_has_a_question_its_name_and_known_metrics(path):
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
def test_overrides_set_in_a_cached_composition_give_an_equal_config(overrides):
    assert load(*overrides) == schema.to_config(composed(*overrides))


def test_tests_parse_each_file_of_conf_once(monkeypatch):
    """Else composing, on which many tests spend most of their time, takes twice as long."""
    before = schema._composed.__wrapped__("model=llama3_8b")
    monkeypatch.setattr(OmegaConf, "load", None)
    assert len(schema._composed.__wrapped__("model=llama3_8b")) == len(before)


def test_a_group_has_an_option_of_conf_or_the_defaults_of_its_dataclass():
    groups = {
        item.name: item.type
        for item in fields(ExperimentConfig)
        if isinstance(item.type, type) and is_dataclass(item.type)
    }
    defaults = OmegaConf.load(CONF / "config.yaml").defaults
    listed = [next(iter(entry)) for entry in defaults if not isinstance(entry, str)]
    with_files = {name for name in groups if (CONF / name).is_dir()}
    assert with_files == set(listed[: len(with_files)])
    config = load("workload=chat")  # builtin brings a host
    for group in ("parallel", "cache", "prefetch", "scheduler", "executor", "engine", "tracker"):
        assert getattr(config, group) == groups[group]()


def test_compat_sets_its_settings_together_and_an_override_wins_over_it():
    later = load("compat=sglang_0_5_23")
    assert later.prefetch.stage_at is StageAt.hit
    assert later.compat.rules.deadline_from is DeadlineFrom.first_poll
    assert later.scheduler.swa_budget == "sglang_0_5_23"
    config = load("prefetch.stage_at=enqueue", "compat=sglang_0_5_23")
    assert config.prefetch.stage_at is StageAt.enqueue
    assert config.compat.rules.deadline_from is DeadlineFrom.first_poll


def test_the_wandb_mode_and_the_data_directory_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("HICACHE_DATA", "somewhere")
    config = load()
    assert (config.tracker.wandb_mode.value, config.data_dir) == ("disabled", "somewhere")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("cache.pagesize=8", "did you mean cache.page_size?"),
        ("cach.page_size=8", "did you mean cache.page_size?"),
        ("cache.foo=1", "Key 'foo' not in 'CacheConfig'"),
        ("cache.page_size=many", "cache.page_size=many"),
        ("cache.host_gib=1,2", ""),
        ("prefetch.cut=never", "expected one of [abandon, fit, restorable]"),
        ("storage=nope", "expected one of file, memory, mooncake, mooncake_rdma, mooncake_tcp, no"),
        ("cache.page_size", "cannot parse cache.page_size: expected KEY=VALUE"),
        ("name=~/x", "cannot parse name=~/x: expected KEY=VALUE; quote a value"),
        ("name=a (copy)", "cannot parse name=a (copy): expected KEY=VALUE; quote a value"),
    ],
)
def test_an_override_that_cannot_be_composed_is_refused_in_one_sentence(override, told):
    sentences = []
    for way in (load, composed):
        with pytest.raises(HydraException) as caught:
            way(override)
        sentences.append(sentence(caught.value))
    assert told in sentences[0]
    assert "\n" not in sentences[0]
    assert sentences[0] == sentences[1]


STOPS = f"prefetch.stop must be one of {', '.join(STOP_POLICIES)}, got 'never'"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+cache.typo=8", "unknown knob cache.typo"),
        ("workload.kind=???", "missing value: set workload.kind"),
        ("prefetch.stop=never", STOPS),
        (
            "cache.page_size=24",
            "a power of two or, in simulated runs, a multiple of 16, got 24",
        ),
        ("parallel.stage_layers=${name}", "stage_layers must be a list, not 'adhoc'"),
        ("cache.host_gib=inf", "cache.host_gib must be a finite number, got inf"),
        ("prefetch.occupied_share=2", "prefetch.occupied_share must be between 0 and 1, got 2"),
        ("tracker.interval_s=0", "tracker.interval_s must be at least 0.001, got 0"),
        (
            "name=../../evil",
            "name must be a relative path without `..`, below outputs/, got '../..",
        ),
        ("name=/evil", "name must be a relative path without `..`, below outputs/, got '/evil'"),
        ("parallel.tp=3", "parallel.tp must divide the 8 KV heads of gpt_oss_120b or be a multi"),
        ("parallel.router=mine", f"router must be one of {', '.join(ROUTERS)}, got 'mine'"),
        ("executor.kind=mine", "kind must be one of simulated, torch, got 'mine'"),
        ("executor.copy_path=mine", "copy_path must be one of kernel, copy_engine, staged, got"),
        ("scheduler.swa_budget=mine", "swa_budget must be one of no_host_term, reports, double,"),
        ("parallel.ranks=2 executor=torch", "ranks=2 needs executor.kind=simulated ("),
        ("parallel.ranks=2 storage=none", "ranks=2 needs a storage engine, got storage.kind=none"),
        ("engine.explain=true executor=torch", "explain=true needs executor.kind=simulated"),
        ("storage.tiering=exclusive", "exclusive needs storage.write=on_host_eviction"),
        ("storage.faults.gone_for_s=1", "storage.faults.gone_for_s=1.0 needs"),
        (
            "cache.page_size=16384 cache.checkpoints=every",
            "cache.checkpoint_tokens=8192 must be a multiple of cache.page_size=16384",
        ),
    ],
)
def test_a_value_that_no_run_can_use_is_refused(override, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        load(*override.split())


def test_tensor_parallelism_must_divide_the_heads_of_full_and_of_window_layers():
    layers = {"name": "both", "num_full_layers": 1, "num_swa_layers": 1, "window_len": 64}
    heads = {"num_query_heads": 12, "num_kv_heads": 4, "swa_num_kv_heads": 12, "hidden_size": 768}
    sizes = {"head_dim": 64, "dense_params": 4_000_000, "head_params": 768_000}
    config = load("parallel.tp=4")
    model = ModelConfig(**layers, **heads, **sizes)
    assert replace(config, model=model).tp == 4
    for tp, num_heads in ((6, 4), (8, 12)):
        with pytest.raises(ValueError, match=f"must divide the {num_heads} KV heads of both"):
            replace(config, model=model, parallel=replace(config.parallel, tp=tp))
    assert load("model=kimi_linear_48b", "parallel.tp=3").tp == 3  # latent KV has no heads


def test_a_model_uses_its_default_number_of_devices_or_all_of_the_machine():
    assert [load("model=qwen3_32b", f"hardware={name}").tp for name in ("h200", "h100")] == [16, 8]
    assert load("model=qwen3_32b", "hardware=h100", "parallel.tp=4").tp == 4


@pytest.mark.parametrize(
    ("overrides", "is_inert"),
    [((), True), (("cache.checkpoints=every",), False)],
)
def test_checkpoint_tokens_has_no_effect_only_if_no_choice_uses_it(overrides, is_inert):
    inert = inert_knobs(load("model=qwen3_next_80b", *overrides), GROUPS)
    assert ("cache.checkpoint_tokens" in inert) is is_inert


@pytest.mark.parametrize(("stages", "is_inert"), [(1, True), (2, False), (4, False)])
def test_stage_layers_has_no_effect_only_with_one_stage(stages, is_inert):
    inert = inert_knobs(load(f"parallel.pp={stages}", "parallel.tp=1"), GROUPS)
    assert ("parallel.stage_layers" in inert) is is_inert
    assert inert["parallel.link_gbps"] == "parallel.decode>=1 or storage.kind=peers"


def test_a_setting_of_one_option_selects_that_option_unless_one_is_typed():
    told = ["-m", "model.from_hf=x", "seed=0,1"]
    assert schema.with_implied(told) == [*told, "model=from_hf"]
    assert schema.with_implied(["experiment=sizing", "model.from_hf=x"])[2:] == ["model=from_hf"]
    for typed in ("workload=mooncake_conversation", "experiment=prefetch_stop"):
        assert schema.with_implied(["workload.path=x", typed]) == ["workload.path=x", typed]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("cache.foo", " (cache has pools, page_size)"),
        ("cache.pool", " (did you mean cache.pools?)"),
        ("sed", " (did you mean seed?)"),
        ("nothing", ""),
        ("cache.windows", " (cache.windows is now cache.checkpoints)"),
        ("scheduler.refresh", " (scheduler.refresh is now compat.rules.refresh)"),
    ],
)
def test_the_setting_that_an_unknown_name_probably_means_is_suggested(word, told):
    assert meant(word, ["cache.pools", "cache.page_size", "seed", "run"]) == told


@pytest.mark.parametrize(
    ("override", "kinds"),
    [("workload.rounds=3", "multi_turn"), ("workload.groups=3", "shared_prefix")],
)
def test_a_setting_of_another_workload_kind_is_refused_with_that_kind(override, kinds):
    with pytest.raises(HydraException) as refused:
        load("workload=chat", override)
    told = sentence(refused.value)
    assert told.endswith(f"({override[:-2]} is a setting of workload={kinds})")


def test_an_unknown_setting_of_another_group_is_not_ascribed_to_a_workload():
    error = ConfigKeyError("raised while composing config: Key 'path' not in 'CacheConfig'")
    assert "workload" not in sentence(error)


def test_the_help_lists_the_question_of_each_experiment():
    lines = [line for line in help_of([]).splitlines() if line.endswith("?")]
    assert len(lines) == len(list((CONF / "experiment").glob("*.yaml")))
    assert any(line.split()[:2] == ["sizing", "how"] for line in lines)
