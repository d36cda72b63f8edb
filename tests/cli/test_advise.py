"""`hicache advise`: the changes that it tries, the one that it advises, and its output."""

import json
from itertools import product

import pytest

from hicache.cli import advice, advise
from hicache.cli.advice import Trial, best_of
from hicache.cli.engine_flags import Choice, grid_of, is_possible, neighbors, todays
from hicache.runs.stored import read_yaml


def grid(engine="sglang", typed=(), host_gib=0.0, kept=None):
    return grid_of(
        engine,
        todays(typed),
        host_gib=host_gib,
        has_storage=False,
        kept=kept,
        sizes=(64.0, 256.0),
        storage="nvme",
        num_devices=2,
    )


def named(arms):
    return [", ".join(each.what for each in arm if each.what != "as today") for arm in arms]


def test_storage_is_tried_only_together_with_a_host_cache():
    plain = grid()
    today = tuple(each[0] for each in plain.values())
    assert named(neighbors(plain, today)) == [
        "host cache of 64 GiB",
        "host cache of 256 GiB",
        "host cache of 64 GiB, storage (nvme)",
    ]


def test_no_arm_waits_for_storage_without_storage_and_a_host_cache():
    plain = grid()
    arms = [arm for arm in product(*plain.values()) if is_possible(arm, plain)]
    waits = [arm for arm in arms if arm[3].what != "as today"]
    assert waits
    assert all(arm[1].is_on and arm[0].is_on for arm in waits)


def test_the_flag_for_sglang_gives_the_host_size_per_device_in_gigabytes():
    assert grid()["host"][1].flags == "--enable-hierarchical-cache --hicache-size 34"
    assert grid("vllm")["host"][1].flags == "--kv-offloading-size 64"


def test_flags_that_set_where_states_are_kept_are_those_of_the_engine():
    assert "--chunked-prefill-size 2048" in [x.flags for x in grid(kept="states")["states"]]
    assert [x.flags for x in grid("vllm", kept="windows")["states"]][1:] == [
        "--prefix-cache-retention-interval 2048",
        "--prefix-cache-retention-interval 16384",
    ]


def trial(weak, middle, gib):
    arm = (Choice(part="host", what=f"{gib}", host_gib=gib),)
    return Trial(arm=arm, new=arm, effects={}, weak=weak, middle=middle, cost="")


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(0.01, 0.30, 64), trial(-0.1, 0.5, 256)], None),  # not sure
        ([trial(0.1, 0.15, 64), trial(0.2, 0.30, 256)], 256),
        ([trial(0.2, 0.29, 64), trial(0.2, 0.30, 256)], 64),  # as good, and smaller
    ],
)
def test_the_advised_change_has_a_sure_gain_with_the_smallest_host_cache(trials, chosen):
    best = best_of(trials, 0.02)
    assert (best and best.arm[0].host_gib) == chosen


def unique(tmp_path):
    rows = [f"{place / 10},{900 + 7 * place},20\n" for place in range(240)]
    log = tmp_path / "log.csv"
    log.write_text("timestamp,input_length,output_length\n" + "".join(rows))
    return log


def test_no_change_is_advised_for_a_log_without_repeated_prompts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advice, "PROBE", 20)
    out = tmp_path / "out"
    server = ["model=llama3_8b", "hardware=h100", "parallel.tp=1"]
    short = ["--windows", "3", "--gib", "16", "--workers", "1", "--out-dir", str(out)]
    advise.main([str(unique(tmp_path)), *server, *short, "--json", "--minutes", "30"])
    said = json.loads(capsys.readouterr().out)
    assert said["changes"] == []
    assert said["num_tried"] == 2
    configs = [read_yaml(path, dict) for path in out.rglob("config.yaml")]
    assert configs
    assert all(each["workload"]["warm_up_s"] > 0 for each in configs)
    assert "0.0% of the prompt tokens of the log repeat" in " ".join(said["notes"])
    assert "**No change is worth it.**" in (out / "advice.md").read_text()


def test_a_host_cache_is_advised_if_repeated_prompts_exceed_the_device_cache(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(advice, "PROBE", 20)
    log = tmp_path / "log.jsonl"
    rows = [  # 40 documents of 8,192 tokens, asked for in turn
        {"timestamp": 400 * place, "input_length": 8200, "output_length": 4,
         "hash_ids": [*range(100 * (place % 40), 100 * (place % 40) + 16), 10_000 + place]}
        for place in range(200)
    ]  # fmt: skip
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    server = ["model=llama3_8b", "hardware=h100", "parallel.tp=1", "cache.device_gib=10"]
    short = ["--windows", "3", "--gib", "64", "--workers", "1", "--out-dir", str(tmp_path / "o")]
    advise.main([str(log), *server, *short, "--minutes", "30", "--engine", "vllm"])
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("| host cache of 64 GiB |"))
    assert "+64 GiB of host memory" in row
    assert "`--kv-offloading-size 64`" in row
