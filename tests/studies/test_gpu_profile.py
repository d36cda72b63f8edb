"""Measurements of a bench as entries of a hardware profile."""

import json

import pytest

from experiments.gpu import profile
from hicache.runs.schema import config_of


def sweep(case, page_size, row_bytes, programs, rate):
    parameters = {"page_size": page_size, "row_bytes": row_bytes, "num_programs": programs}
    return {"op": "sweep", "case": case, "gb_per_s": rate, "parameters": parameters}


def one(op, case, rate, **parameters):
    return {"op": op, "case": case, "gb_per_s": rate, "parameters": parameters}


def alone(direction, rate, case="page 64, 1 programs"):
    return one(direction, case, rate)


LAUNCHED = {"link_programs": 4, "tile_bytes": 65536, "warps": 16}
RECORDS = [
    sweep("to_device", 1, 256, 2, 10.0),
    sweep("to_device", 1, 256, 4, 12.0),
    sweep("to_device", 1, 256, 16, 14.0),
    sweep("to_device", 16, 2048, 4, 50.0),
    sweep("to_host", 16, 2048, 4, 51.0),
    sweep("device", 16, 2048, 0, 1900.0),
]
NOTES = {"decode slowed by 4 programs to_device": 1.03, "something else": 7.0}


def bench_of(records=RECORDS, notes=NOTES, engine=53.5):
    records = [one("ceiling", "copy engine to_device", engine), *records]
    return {"machine": "a GPU (torch 2)", "records": records, "notes": notes}


def entries(*given, engine=53.5, **launched):
    return profile.entries(bench_of(*given, engine=engine), LAUNCHED | launched)


def test_a_profile_has_the_measured_rates_of_the_launched_programs():
    found = entries()
    assert found["kernel_to_device"]["size"] == [256, 32768]
    assert list(map(float, found["kernel_to_device"]["rate"])) == [12e9, 50e9]
    assert found["kernel_to_host"]["size"] == [32768]
    assert float(found["pcie_bandwidth"]["value"]) == 53.5e9
    assert found["copy_slowdown"]["value"] == 1.03
    assert {entry["status"] for entry in found.values()} == {"measured"}
    assert all("a GPU (torch 2)" in entry["source"] for entry in found.values())
    some = [each for each in RECORDS if each["case"] != "to_host"]
    assert set(entries(some, {})) == {"pcie_bandwidth", "kernel_to_device"}


def test_the_printed_profile_is_a_valid_machine_file(tmp_path, monkeypatch, capsys):
    records = [*RECORDS, alone("to_device", 30.0), alone("to_host", 40.0)]
    (tmp_path / "bench.json").write_text(json.dumps(bench_of(records)))
    monkeypatch.setattr("sys.argv", ["profile", str(tmp_path / "bench.json")])
    profile.main()
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    machine = config_of(f"hardware={tmp_path / 'mine.yaml'}").hardware
    assert (machine.name, machine.pcie_bandwidth.value) == ("h200", 53.5e9)
    assert machine.kernel_to_device.rate == (12e9, 50e9)
    assert machine.copy_kernel.to_host.value == 40e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": None}, "expected a bench on a GPU"),
        ({"link_programs": 3}, r"launches 3 programs, but the bench measured \[2, 4, 16\]"),
    ],
)
def test_a_bench_without_a_gpu_or_the_launched_programs_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        entries(**changes)


def test_rates_per_program_are_those_of_our_kernel_with_pages_and_coded_bytes():
    coded = "to_host, bfloat16 to int8, items of (16, 8, 128), 1 programs"
    records = [
        alone("to_device", 36.0),
        alone("to_host", 50.0),
        alone("to_host", 30.0, "page 64, 2 programs"),
        one("load", "int8 pages, 1 programs", 14.0),
        one("load", "int8 pages, 4 programs", 50.0),
        one("encode", coded, 24.0),
    ]
    found = entries(RECORDS + records)["copy_kernel"]
    assert {name: found[name] for name in LAUNCHED} == LAUNCHED
    rates = {"to_device": 36e9, "to_host": 50e9, "coded_to_device": 14e9}
    rates["coded_to_host"] = 24e9 * 132 / 256
    for name, rate in rates.items():
        assert float(found[name]["value"]) == pytest.approx(rate)
        assert found[name]["status"] == "measured"


def test_the_copy_engine_has_a_rate_for_each_piece_size():
    pieces = [
        one("sweep", f"copy engine {direction}", rate, piece_bytes=size)
        for direction, size, rate in (
            ("to_device", 65536, 40.0), ("to_device", 4096, 5.0), ("to_host", 4096, 6.0)
        )
    ]  # fmt: skip
    found = entries(RECORDS + pieces)["copy_engine"]
    assert (found["size"], found["rate"]) == ([4096, 65536], [5e9, 40e9])
