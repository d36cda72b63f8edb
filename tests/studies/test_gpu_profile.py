"""What the bench measured, turned into entries of a hardware profile."""

import pytest

from experiments.gpu import profile


def record(direction, page_size, row_bytes, programs, rate):
    return {
        "op": "sweep",
        "case": direction,
        "gb_per_s": rate,
        "parameters": {"page_size": page_size, "row_bytes": row_bytes, "num_programs": programs},
    }


def alone(direction, rate, shape="pages of 128 KiB", kernel="ours"):
    return {
        "op": "program",
        "case": f"{direction}, {kernel}, {shape}",
        "gb_per_s": rate,
        "parameters": {"direction": direction, "kernel": kernel, "shape": shape},
    }


LAUNCHED = {"link_programs": 4, "tile_bytes": 65536, "warps": 16}


def entries(bench, **changes):
    return profile.entries(bench, LAUNCHED | changes)


BENCH = {
    "machine": "a GPU (torch 2)",
    "ceilings_gb_per_s": {"engine_to_device": 53.5},
    "records": [
        record("to_device", 1, 256, 2, 10.0),
        record("to_device", 1, 256, 4, 12.0),
        record("to_device", 1, 256, 16, 14.0),
        record("to_device", 16, 2048, 4, 50.0),
        record("to_host", 16, 2048, 4, 51.0),
        record("device", 16, 2048, 0, 1900.0),
    ],
    "goals": [
        {"what": "decode slowed by 4 programs to_device", "got": 1.03},
        {"what": "something else", "got": 7.0},
    ],
}


def test_the_rate_of_as_many_programs_as_the_executor_launches_is_taken():
    profile = entries(BENCH)
    assert profile["kernel_to_device"]["size"] == [256, 32768]
    assert list(map(float, profile["kernel_to_device"]["rate"])) == [12e9, 50e9]
    assert profile["kernel_to_host"]["size"] == [32768]


def test_link_and_slowdown_are_measured_figures():
    profile = entries(BENCH)
    assert float(profile["pcie_bandwidth"]["value"]) == 53.5e9
    assert profile["copy_slowdown"]["value"] == 1.03
    assert {entry["status"] for entry in profile.values()} == {"measured"}
    assert all("a GPU (torch 2)" in entry["source"] for entry in profile.values())


def test_a_dry_run_is_refused():
    with pytest.raises(ValueError, match="expected a bench on a GPU"):
        entries(BENCH | {"ceilings_gb_per_s": {"engine_to_device": None}})


def test_what_was_not_measured_is_left_out():
    stopped = [each for each in BENCH["records"] if each["case"] != "to_host"]
    profile = entries(BENCH | {"records": stopped, "goals": []})
    assert set(profile) == {"pcie_bandwidth", "kernel_to_device"}


def test_what_one_program_moved_joins_how_it_is_launched():
    records = [
        alone("to_device", 36.0),
        alone("to_host", 50.0),
        alone("to_host", 9.0, kernel="sgl_warps"),
        alone("to_host", 30.0, shape="rows of 256 B"),
    ]
    found = entries(BENCH | {"records": BENCH["records"] + records})["copy_kernel"]
    assert {name: found[name] for name in LAUNCHED} == LAUNCHED
    assert float(found["to_device"]["value"]) == 36e9
    assert float(found["to_host"]["value"]) == 50e9
    assert found["to_host"]["status"] == "measured"


def test_another_number_of_programs_than_the_bench_measured_is_refused():
    with pytest.raises(
        ValueError, match=r"launches 3 programs, but the bench measured \[2, 4, 16\]"
    ):
        entries(BENCH, link_programs=3)


def test_rates_of_coded_copies_are_those_of_one_program_in_coded_bytes():
    def one(op, case, rate):
        return {"op": op, "case": case, "gb_per_s": rate, "parameters": {}}

    records = [
        alone("to_device", 36.0),
        alone("to_host", 50.0),
        one("load", "int8 pages, 1 programs", 14.0),
        one("load", "int8 pages, 4 programs", 50.0),
        one("encode", "to_host, bfloat16 to int8, items of (16, 8, 128), 1 programs", 24.0),
    ]
    found = entries(BENCH | {"records": BENCH["records"] + records})["copy_kernel"]
    assert found["coded_to_device"]["value"] == 14e9
    assert found["coded_to_host"]["value"] == pytest.approx(24e9 * 132 / 256)


def test_the_copy_engine_has_a_rate_for_each_size_of_a_piece():
    pieces = [
        {
            "op": "sweep",
            "case": f"copy engine {direction}",
            "gb_per_s": rate,
            "parameters": {"piece_bytes": size},
        }
        for direction, size, rate in (
            ("to_device", 65536, 40.0),
            ("to_device", 4096, 5.0),
            ("to_host", 4096, 6.0),
        )
    ]
    found = entries(BENCH | {"records": BENCH["records"] + pieces})["copy_engine"]
    assert (found["size"], found["rate"]) == ([4096, 65536], [5e9, 40e9])
