import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.diff.__main__ import SIDES, Limit, main, measure
from experiments.diff.compare import Comparison, Row, compare
from experiments.diff.engines import Launch
from experiments.diff.explain import explain
from experiments.diff.protocol import Hits, Outcome, Pools, SideError
from experiments.diff.rooms import ROOM, bytes_of, chosen, pools_for
from hicache.request import Request
from tests.diff.sides import FAKE, POOLS, prompt, requests_of

Compared = Callable[..., Comparison]
AGAIN = requests_of(prompt(1, 4), prompt(2, 4), prompt(1, 4), prompt(2, 4))
UNIT_BYTES = {"full": 10, "swa": 1, "mamba": 1}


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    common = ["--workload", "builtin", "--requests", "30", "--pools", "device_tokens=65536"]
    common[-1] += ",host_tokens=65536,max_len=16384"
    common += ["--no-edges"]
    monkeypatch.setattr(sys, "argv", ["diff", *common, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


def test_hicache_does_not_differ_from_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same = ["--base", "hicache", "--head", "hicache", "--components", "full"]
    assert ask(monkeypatch, *same, "--out", str(tmp_path), "--fail-on", "hits:-0.1%") == 0
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["kinds"] == {"equal": 30}
    assert found["hit_rate"]["base"] == found["hit_rate"]["head"] > 0
    assert (tmp_path / "diff.png").is_file()
    assert "hits differ in 0 of 30" in (tmp_path / "comment.md").read_text()


@pytest.mark.parametrize("components", ["full", "swa+mamba"])
def test_a_comparison_with_delayed_copies_runs_to_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, components: str
) -> None:
    same = ["--base", "hicache", "--head", "hicache", "--components", components]
    assert ask(monkeypatch, *same, "--copies", "delayed:2", "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["kinds"] == {"equal": 30}
    assert found["pools"]["copy_delay"] == 2
    totals = found["totals"]["head"]
    for kind in components.split("+"):
        # what the last two requests back up is not on storage yet
        assert 0 < totals[f"moved/{kind}/write"] < totals[f"moved/{kind}/back_up"]
    assert totals["free/full/device"] > 0
    assert "locked/full/host" not in totals


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


def test_another_eviction_policy_is_a_difference_and_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "worst.py").write_text(
        "class Worst:\n"
        "    def rank(self, entry, tier, kind):\n"
        "        return -entry.used if kind == 'full' else None\n"
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
    assert any(
        "The last request that shares a prefix with it was" in each for each in found["explanation"]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--base", "no/such/path"), "no/such/path is neither a release"),
        (("--base", "hicache", "--head", "tests"), "tests contains no sglang"),
        (("--pools", "device=3"), "--pools must be NAME=NUMBER"),
        (("--pools", "device_tokens=64"), "device_tokens=64 must be at least"),
        (("--pools", "max_len=600000"), "do not fit in device_tokens"),
        (("--pools", "max_len=2"), "no request of builtin fits"),
        (("--copies", "soon"), "--copies must be instant or delayed:N, got 'soon'"),
        (("--fail-on", "luck:-1%"), "--fail-on must be METRIC:-0.5%"),
        (("--model", "gpt"), "--model must be one of"),
        (("--components", "swa", "--model", "llama3_8b"), "--model llama3_8b has no swa layers"),
        (("--workload", "nothing"), "workload.kind must be one of"),
        (("--head", "hicache", "--eviction", "no:Such"), "cache.policy=no:Such cannot be loaded"),
        (("--corrected",), "--corrected is for --engine vllm, got sglang"),
        (("--engine", "vllm", "--head", "tests"), "tests contains no vllm"),
        (("--engine", "vllm", "--base", "no/such/path"), "no/such/path is neither a release"),
        (("--engine", "vllm", "--pools", "max_len=600000"), "do not fit in device_tokens"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
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


@pytest.mark.parametrize("missing", ["--base", "--head"])
def test_a_missing_base_or_head_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    sides = {"--base": "hicache", "--head": "hicache"}
    del sides[missing]
    assert ask(monkeypatch, *(text for side in sides.items() for text in side)) == 2
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


def test_requests_too_long_for_the_device_pools_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sides = ["--base", "hicache", "--head", "hicache", "--out", str(tmp_path), "--no-explanation"]
    assert ask(monkeypatch, *sides, "--pools", "device_tokens=12288,max_len=12288") == 2
    assert "the device pools are too small" in capsys.readouterr().out


def test_a_broken_limit_names_both_values_and_the_limit(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7"})  # a quarter fewer hits
    said = Limit.parse("hits:-20%").broken_by(found, UNIT_BYTES)
    assert said == "hits changed by -25.00 % from 32 to 24; the limit is -20 %"
    assert Limit.parse("evicted_bytes:+1%").broken_by(found, UNIT_BYTES) is not None
    with pytest.raises(SideError, match="--fail-on must be"):
        Limit.parse("hits:0%")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Make both sides fake, head with little room; return the options of each comparison."""
    opened: list[dict[str, str]] = []

    def prepare(_: object, spec: str) -> Launch:
        return replace(FAKE, name=spec)

    def compared(
        requests: Sequence[Request],
        pools: Pools,
        launches: tuple[Launch, Launch],
        folder: Path,
        **more: bool,
    ) -> Comparison:
        opened.append(
            {"requests": f"{len(requests)}", "until_first": f"{more['until_first']}",
             "copy_delay": f"{pools.copy_delay}"}
            | {f"{side}_{name}": value for side, launch in zip(SIDES, launches, strict=True)
               for name, value in launch.options.items()}
        )  # fmt: skip
        scarce = replace(launches[1], options={"pages": "30", "aborts": "1"})
        ample = replace(launches[0], options={"aborts": "1"})
        launches = (ample, ample if launches[1].name == "ample" else scarce)
        return compare(requests[:30], pools, launches, folder, **more)

    monkeypatch.setattr("experiments.diff.__main__.prepare", prepare)
    monkeypatch.setattr("experiments.diff.__main__.compare", compared)
    return opened


def ask_fakes(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> int:
    sides = ["--base", "scarce", "--head", "scarce", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["diff", *sides, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


def test_requests_of_edge_cases_run_before_every_comparison_and_are_reported(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fakes: list[dict[str, str]],
) -> None:
    arguments = ["--workload", "builtin", "--requests", "40", "--until-first"]
    arguments += ["--write-policy", "write_back", "--eviction", "lfu", "--no-explanation"]
    assert ask_fakes(monkeypatch, tmp_path, *arguments, "--fail-on", "hits:-0.1%") == 1
    settings = {"core": "python", "compat": "sglang_0_5_23", "write_policy": "write_back"}
    options = {f"{side}_{name}": value for side in SIDES for name, value in settings.items()}
    options["head_eviction"] = "lfu"
    assert fakes == [
        {"requests": "500", "until_first": "False", "copy_delay": "0", **options},
        {"requests": "500", "until_first": "False", "copy_delay": "2", **options},
        {"requests": "40", "until_first": "True", "copy_delay": "0", **options},
    ]
    parts = (("edges", "edges"), ("edges-delayed", "edges"), (".", "builtin"))
    for name, workload in parts:
        folder = tmp_path / name
        found = json.loads((folder / "diff.json").read_text())
        assert found["first_hit"] is not None
        asked = found["asked"]
        assert (asked["write_policy"], asked["workload"]) == ("write_back", workload)
        assert asked["copies"] == ("delayed:2" if "delayed" in name else "instant")
        assert "out" not in asked
        assert f"requests of {workload}" in (folder / "comment.md").read_text()
        assert (folder / "diff.png").is_file()
    said = capsys.readouterr().out
    assert "edges: limit exceeded: hits changed by" in said
    assert "edges-delayed: limit exceeded: hits changed by" in said
    assert (
        "requests of edges, full attention, 12,288 tokens on the device and 24,576 on the host,"
        in said
    )
    assert " delayed:2 copies, bytes of llama3_8b." in said
    assert "builtin: limit exceeded: hits changed by" in said
    assert said.strip().endswith(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [(["--workload", "edges", "--requests", "20"], ["20"]), (["--no-edges"], ["30"])],
)
def test_requests_of_edge_cases_can_be_the_only_ones_or_left_out(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fakes: list[dict[str, str]],
    arguments: list[str],
    counts: list[str],
) -> None:
    common = ["--workload", "builtin", "--requests", "30", "--head", "ample"]
    assert ask_fakes(monkeypatch, tmp_path, *common, *arguments) == 0
    assert [each["requests"] for each in fakes] == counts
    assert not (tmp_path / "edges").exists()


def test_the_report_is_written_before_the_first_difference_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fakes: list[dict[str, str]]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("experiments.diff.__main__.explain", fail)
    with pytest.raises(ZeroDivisionError):
        ask_fakes(monkeypatch, tmp_path, "--workload", "edges")
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["explanation"] is None
    assert found["first_hit"] is not None
    comment = (tmp_path / "comment.md").read_text()
    assert "**First request with different hits.** Request " in comment


def test_the_report_remains_if_a_side_fails_during_the_explanation(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fakes: list[dict[str, str]],
) -> None:
    def fail(*_: object) -> None:
        raise SideError("it is gone")

    monkeypatch.setattr("experiments.diff.__main__.explain", fail)
    assert ask_fakes(monkeypatch, tmp_path, "--workload", "edges") == 0
    said = capsys.readouterr()
    assert "cannot be explained: it is gone" in said.err
    assert "**First request with different hits.** Request " in said.out


def test_an_explanation_replaces_the_short_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fakes: list[dict[str, str]]
) -> None:
    launches = [replace(FAKE, options={"aborts": "1", "pages": pages}) for pages in ("1000", "30")]
    monkeypatch.setattr(
        "experiments.diff.__main__.explain",
        lambda row, requests, pools, _, folder: explain(
            row, requests, pools, tuple(launches), folder
        ),
    )
    assert ask_fakes(monkeypatch, tmp_path, "--workload", "edges") == 0
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["explanation"][0].startswith(f"Request {found['first_hit']} (")
    comment = (tmp_path / "comment.md").read_text()
    assert f"**First request that differs.** Request {found['first_hit']} (" in comment
    assert f"**First difference of any kind.** Request {found['first']} (" in comment


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("timestamp,input_length,output_length\n0,100,3\n1,900,3\n2,50,3\n")
    pools = replace(ROOM, max_len=500)
    found = chosen("trace", 9, pools, str(path))
    assert [each.prompt_len for each in found] == [100, 50]
    assert len(chosen("trace", 1, pools, str(path))) == 1
    with pytest.raises(SideError, match=r"of trace fits: the shortest has 53 tokens, but max_len"):
        chosen("trace", 9, replace(ROOM, max_len=52), str(path))
    assert chosen("trace", 9, replace(ROOM, max_len=53), str(path))[0].prompt_len == 50


@pytest.mark.parametrize(
    ("said", "base", "head", "is_broken"),
    [
        ("hits:-10%", 100, 90, True),
        ("hits:-10%", 100, 91, False),
        ("hits:-10%", 100, 120, False),
        ("hits:+10%", 100, 110, True),
        ("hits:10%", 100, 109, False),
        ("hits:+10%", 0, 1, True),
        ("hits:-10%", 0, 1, False),
        ("hits:-10%", 0, 0, False),
        ("hits:+0.5%", 1000, 1004, False),
        ("hits:+0.5%", 1000, 990, False),
        ("hits:-0.5%", 1000, 1010, False),
        ("hits:-0.5%", 1000, 995, True),
    ],
)
def test_a_limit_is_broken_by_a_change_of_at_least_its_size(
    said: str, base: int, head: int, *, is_broken: bool
) -> None:
    row = Row(
        number=0,
        prompt_len=200,
        base=Outcome(hits=Hits(base, 0, 0)),
        head=Outcome(hits=Hits(0, head, 0)),
    )
    found = Comparison(base={}, head={}, pools=POOLS, rows=(row,))
    assert (Limit.parse(said).broken_by(found, UNIT_BYTES) is not None) == is_broken
    assert measure(found, "base", "device_hits", UNIT_BYTES) == base
    assert measure(found, "head", "host_hits", UNIT_BYTES) == head
    assert measure(found, "head", "storage_hits", UNIT_BYTES) == 0


def test_copies_are_measured_in_bytes_of_each_kind() -> None:
    counts = {"moved/full/read": 3, "moved/swa/write": 5, "evicted/mamba/host": 7}
    row = Row(
        number=0,
        prompt_len=200,
        base=Outcome(hits=Hits(0, 0, 0), counts=counts),
        head=Outcome(hits=Hits(0, 0, 0)),
    )
    found = Comparison(base={}, head={}, pools=POOLS, rows=(row,))
    unit_bytes = {"full": 10, "swa": 100, "mamba": 1000}
    assert measure(found, "base", "copied_bytes", unit_bytes) == 530
    assert measure(found, "base", "evicted_bytes", unit_bytes) == 7000
    assert measure(found, "head", "copied_bytes", unit_bytes) == 0


def test_pools_have_the_sizes_of_their_workload_and_kind() -> None:
    full = pools_for("mooncake_conversation", "full", "", "instant")
    assert full.device_tokens == 524_288
    assert (full.window_len, full.num_states, full.copy_delay, full.has_storage) == (0, 0, 0, True)
    swa = pools_for("weka_agentic", "swa", "", "delayed:12")
    assert (swa.window_len, swa.swa_tokens, swa.copy_delay) == (1024, 393_216, 12)
    assert pools_for("chat", "swa", "swa_tokens=99", "instant").swa_tokens == 99
    assert pools_for("chat", "mamba", "", "instant").num_states == 160
    assert not pools_for("chat", "full", "", "instant", has_storage=False).has_storage
    assert pools_for("chat", "full", "host_tokens=1,has_storage=1", "instant").has_storage
    states = pools_for("weka_agentic", "mamba", "num_running=2,has_storage=0", "instant")
    assert (states.num_states, states.num_running, states.has_storage) == (64, 2, False)
    assert not pools_for("chat", "full", "host_tokens=0", "instant").has_storage
    tight = "device_tokens=256,host_tokens=512,max_len=256"
    assert pools_for("chat", "full", tight, "instant").host_ratio == 2
    for wrong in ("device_tokens=255,max_len=255", "device_tokens=256,max_len=257"):
        with pytest.raises(SideError):
            pools_for("chat", "full", wrong, "instant")
    for wrong in ("delayed", "delayed:x", "later:3"):
        with pytest.raises(SideError, match="--copies must be"):
            pools_for("chat", "full", "", wrong)


def test_bytes_are_those_of_each_kind_in_the_model() -> None:
    assert bytes_of("gemma3_27b", "swa")["swa"] > bytes_of("gemma3_27b", "swa")["full"] > 0
    assert bytes_of("qwen3_next_80b", "mamba")["mamba"] > 0
    assert bytes_of("llama3_8b", "full")["full"] == 131_072
    with pytest.raises(SideError, match="has no mamba"):
        bytes_of("gemma3_27b", "mamba")
