import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.diff.__main__ import Limit, main, measure
from experiments.diff.compare import Comparison
from experiments.diff.protocol import SideError
from experiments.diff.rooms import bytes_of, pools_for
from tests.diff.sides import prompt, requests_of

Compared = Callable[..., Comparison]
AGAIN = requests_of(prompt(1, 4), prompt(2, 4), prompt(1, 4), prompt(2, 4))
UNIT_BYTES = {"full": 10, "swa": 1, "mamba": 1}


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    common = ["--workload", "builtin", "--requests", "30", "--pools", "device_tokens=65536"]
    common[-1] += ",host_tokens=65536,max_len=16384"
    monkeypatch.setattr(sys, "argv", ["diff", *common, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


@pytest.mark.parametrize("components", ["full", "swa", "mamba"])
def test_ours_does_not_differ_from_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, components: str
) -> None:
    same = ["--base", "hicache", "--head", "hicache", "--components", components]
    assert ask(monkeypatch, *same, "--out", str(tmp_path), "--fail-on", "hits:-0.1%") == 0
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["kinds"] == {"equal": 30}
    assert found["hit_rate"]["base"] == found["hit_rate"]["head"] > 0
    assert (tmp_path / "diff.png").is_file()
    assert "hits differ in 0 of 30" in (tmp_path / "comment.md").read_text()


def test_an_engine_without_storage_is_compared_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same = ["--engine", "vllm", "--base", "hicache", "--head", "hicache"]
    assert ask(monkeypatch, *same, "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "diff.json").read_text())
    totals = found["totals"]["head"]
    assert totals["hit/full/storage"] == 0
    assert "held/full/storage" not in totals
    assert totals["hit/full/device"] + totals["hit/full/host"] > 0


def test_another_policy_differs_and_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "worst.py").write_text(
        "class Worst:\n    def priority(self, node):\n        return (-node.tick,)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sides = ["--base", "hicache", "--head", "hicache", "--eviction", "worst:Worst"]
    status = ask(
        monkeypatch, *sides, "--out", str(tmp_path / "out"), "--fail-on", "storage_hits:-1%"
    )
    found = json.loads((tmp_path / "out" / "diff.json").read_text())
    assert status == 1
    assert found["first_hit"] is not None
    assert found["explanation"][0].startswith(f"Request {found['first_hit']} (")
    assert "The last request that begins like it was" in found["explanation"][1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--base", "no/such/path"), "no/such/path is neither a release"),
        (("--base", "hicache", "--head", "tests"), "tests holds no sglang"),
        (("--pools", "device=3"), "--pools wants NAME=NUMBER"),
        (("--pools", "device_tokens=64"), "device_tokens=64 is less than a page for each"),
        (("--pools", "max_len=600000"), "the trace is too long for its pools"),
        (("--pools", "max_len=2"), "no request of builtin fits"),
        (("--copies", "soon"), "--copies wants instant or delayed:N, got 'soon'"),
        (("--fail-on", "luck:-1%"), "--fail-on wants METRIC:-0.5%"),
        (("--model", "gpt"), "--model wants one of"),
        (("--components", "swa", "--model", "llama3_8b"), "--model llama3_8b keeps no swa"),
        (("--workload", "nothing"), "workload.kind must be one of"),
        (("--head", "hicache", "--eviction", "no:Such"), "cache.eviction=no:Such cannot be loaded"),
        (("--engine", "vllm", "--head", "tests"), "tests holds no vllm"),
        (("--engine", "vllm", "--base", "no/such/path"), "no/such/path is neither a release"),
        (("--engine", "vllm", "--pools", "max_len=600000"), "too long for its pools"),
    ],
)
def test_bad_input_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    out = ("--base", "hicache", "--head", "hicache", "--out", str(tmp_path))
    assert ask(monkeypatch, *out, *arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("experiments.diff: ")
    assert sentence in said
    assert "\n" not in said


def test_requests_too_long_for_what_runs_beside_them_get_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sides = ["--base", "hicache", "--head", "hicache", "--out", str(tmp_path), "--no-explanation"]
    assert ask(monkeypatch, *sides, "--pools", "device_tokens=12288,max_len=12288") == 2
    assert "the device pools are too small" in capsys.readouterr().out


def test_a_limit_is_broken_in_its_own_direction_only(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7"})  # a quarter fewer hits
    said = Limit.parse("hits:-20%").broken_by(found, UNIT_BYTES)
    assert said == "hits went from 32 to 24, which is -25.00 %; -20 % is too much"
    assert Limit.parse("hits:-30%").broken_by(found, UNIT_BYTES) is None
    assert Limit.parse("hits:+1%").broken_by(found, UNIT_BYTES) is None
    assert Limit.parse("evicted_bytes:+1%").broken_by(found, UNIT_BYTES) is not None


def test_bytes_are_counted_in_those_of_the_model(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7"})
    evicted = found.totals("head")["evicted/full/device"]
    assert measure(found, "head", "evicted_bytes", UNIT_BYTES) == 10 * evicted
    assert bytes_of("llama3_8b", "full")["full"] == 131_072


def test_pools_follow_the_workload_and_what_was_asked() -> None:
    pools = pools_for("weka_agentic", "mamba", "num_running=2,has_storage=0", "delayed:3")
    assert (pools.num_states, pools.num_running, pools.has_storage) == (64, 2, False)
    assert pools.copy_delay == 3
    assert not pools_for("chat", "full", "host_tokens=0", "instant").has_storage


def test_a_limit_wants_a_change() -> None:
    with pytest.raises(SideError, match="--fail-on wants"):
        Limit.parse("hits:0%")
