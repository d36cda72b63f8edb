"""Bytes of a sequence by model, from the config.json that each is published with."""

import json
import sys
from pathlib import Path

import pytest

from experiments.studies import catalog

ENTRIES = json.loads(catalog.CONFIGS.read_text(encoding="utf-8"))
# as kvcache-simulator 0.1.3 says, at 128, 1,024 and 131,072 tokens, and the last without states
KNOWN = {
    "deepseek-v4-flash": (6_516_736, 12_681_216, 907_411_456, 907_411_456),
    "deepseek-v4-pro": (9_255_936, 18_079_744, 1_298_792_448, 1_298_792_448),
    "glm-5.2": (12_189_696, 97_517_568, 12_482_248_704, 12_482_248_704),
    "glm-5.3": (12_189_696, 97_517_568, 12_482_248_704, 12_482_248_704),
    "kimi-k3": (452_911_104, 477_683_712, 4_073_250_816, 3_623_878_656),
    "minimax-m3": (17_596_416, 140_771_328, 18_018_729_984, 18_018_729_984),
    "gemma-4-e2b": (2_359_296, 12_582_912, 811_597_824, 811_597_824),
    "qwen3.8-2.4t-a95b": (309_944_320, 394_354_688, 12_645_916_672, 12_348_030_976),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_sequence_takes_the_bytes_that_the_catalog_says(name: str) -> None:
    found = catalog.totals(catalog.model_of(name, ENTRIES[name]))
    assert (*(total for total, _ in found), found[-1][1]) == KNOWN[name]


def test_what_a_compressor_remembers_is_kept_and_left_out_of_the_comparison() -> None:
    held = catalog.model_of("v4", ENTRIES["deepseek-v4-flash"]).bytes_of(1024)
    assert held["compressor"] == 21 * 4 * 2 * (512 + 128) * 4  # 21 layers, fp32
    assert held["c4"] == 21 * 1024 // 4 * 512 * 2
    assert held["c128"] == 20 * 1024 // 128 * 512 * 2


def test_every_entry_names_its_source() -> None:
    assert len(ENTRIES) == 57
    assert all(entry["source"] for entry in ENTRIES.values())


@pytest.mark.parametrize(("more", "status"), [(0, 0), (1, 1)])
def test_a_difference_is_shown(
    more: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = catalog.totals(catalog.model_of("glm-5", ENTRIES["glm-5"]))
    said = {"glm-5": {"fp32": [[total + more for total in pair] for pair in ours]}, "v4.1": None}
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["catalog", str(stand_in)])
    assert catalog.main() == status
    assert f"{1 - more} of 1 compared are equal; the catalog has 1" in capsys.readouterr().out
