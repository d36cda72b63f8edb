"""What `--help` and docs/knobs.md say about every knob."""

import re
from pathlib import Path

import pytest

from hicache.cli import knobs
from hicache.cli.run import show_help
from hicache.config import CutPolicy, ExperimentConfig, StorageConfig
from hicache.runs.schema import known_keys

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "knobs.md"
GROUPS = knobs.groups_of()
ALL = [each for each in knobs.knobs_of(ExperimentConfig, "") if each.name not in GROUPS]
ALL += [
    each
    for group, kind in GROUPS.items()
    for _, part in knobs.parts_of(group, kind)
    for each in part
]


def test_the_generated_page_of_settings_is_up_to_date():
    wanted = "run: python -m hicache.cli.knobs > docs/knobs.md"
    assert PAGE.read_text(encoding="utf-8") == knobs.as_markdown(), wanted


def test_every_setting_has_a_sentence_of_help_that_also_says_what_none_means():
    assert [knob.name for knob in ALL if not re.fullmatch(r"[A-Z].*\.", knob.meaning)] == []
    assert [
        each.name for each in ALL if each.default == "null" and "None " not in each.meaning
    ] == []


def test_every_knob_is_read_by_the_code():
    rooms = [path for room in ("hicache", "experiments") for path in (ROOT / room).rglob("*.py")]
    words = set(re.findall(r"[.\"]([a-z]\w*)", "\n".join(path.read_text() for path in rooms)))
    exceptions = {
        "hardware.copy_kernel.tile_bytes",  # compiled in, and a test compares them
        "hardware.copy_kernel.warps",
        "storage.faults.preset",  # a name for tables
    }
    unread = {knob.name for knob in ALL if knob.name.rpartition(".")[2] not in words}
    assert unread == exceptions


def test_every_key_of_the_config_is_a_listed_knob():
    parts = (".value", ".rate", ".size", ".source", ".status")
    keys = {key for key in known_keys() if key not in GROUPS and not key.endswith(parts)}
    keys |= {"model.source"}
    assert {knob.name for knob in ALL} == keys


def test_the_help_text_of_a_knob_is_the_comment_of_its_field_and_its_choices():
    found = {knob.name: knob for knob in ALL}
    assert found["parallel.tp"].meaning.startswith("Tensor-parallel size: devices per engine.")
    assert found["storage.deadline_s"].limits == "above 0"
    assert "fit (it is cut to the whole pages that fit)" in found["prefetch.cut"].meaning
    assert knobs.comments_of(CutPolicy)["fit"] == "it is cut to the whole pages that fit"
    assert "delay_s" in knobs.comments_of(StorageConfig)


def test_help_lists_the_groups_or_the_settings_of_a_group(capsys):
    show_help([])
    told = capsys.readouterr().out
    assert "  prefetch   How pages are read from storage into host memory before" in told
    show_help(["storage", "cache"])
    told = capsys.readouterr().out
    for words in (
        "  storage.deadline_s=5.0  (above 0)\n      Time limit in seconds of one storage call",
        "  storage.faults.error_rate=0.0  (0 to 1)",
        "Options: file, memory, mooncake, mooncake_rdma, mooncake_tcp, none, nvme, peers, redis",
        "  cache.page_size=64",
    ):
        assert words in told
    with pytest.raises(SystemExit, match="2"):
        show_help(["strorage"])
    assert "unknown group strorage: the groups are workload" in capsys.readouterr().err
