"""Readers get any bytes and any odd values: they read the file, or refuse it with a sentence."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.workload import trace
from tests.fuzz.readers import MOST_REPEATED, SEEDS, read
from tests.workload.traces import write_lines

# values that rows have by mistake; a text stands for itself, without quotes
ODD = [
    *("null", "true", "-1", "0", "0.5", "-0.0", "1e308", "1e400", "NaN", "[]", "{}", '""', '"x"'),
    *("9223372036854775807", "18446744073709551615", "1" + "0" * 400, "1" * 5000, "[[]]", "[null]"),
    *('"2024-10-27T02:59:59.5+02:00"', '"\\ud800"', f'"{"9" * 30}"', '{"type": "BlockStored"}'),
]
# first bytes of the containers
STARTS = [b"", b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b'{"', b"[["]
ROWS = [path for path in SEEDS if path.suffix in (".jsonl", ".csv")]
MANY = settings(
    max_examples=int(os.environ.get("HICACHE_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "MOST_REPEATED", MOST_REPEATED)
        patch.setattr(trace, "RATIO_FROM", 1 << 20)
        yield


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path (keys and indices) of a JSON value and of each value inside it."""
    yield path
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from places(inner, (*path, key))


def replaced(line: str, path: tuple[Any, ...], odd: str) -> str:
    """The line with the value at `path` replaced, or left out if `odd` is empty."""
    if not path:
        return odd
    value = json.loads(line)
    within = value
    for key in path[:-1]:
        within = within[key]
    if odd:
        within[path[-1]] = "<odd>"
    else:
        del within[path[-1]]
    return json.dumps(value).replace('"<odd>"', odd, 1)


def with_odd_value(line: str, draw: st.DrawFn) -> str:
    path = draw(st.sampled_from(list(places(json.loads(line)))))
    return replaced(line, path, draw(st.sampled_from(["", *ODD])))


@st.composite
def odd_files(draw: st.DrawFn) -> bytes:
    """Draw the contents of a fixture with some lines changed, cut, repeated or moved."""
    path = draw(st.sampled_from(ROWS))
    lines = path.read_text().splitlines()
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(["value", "value", "value", "cut", "repeat", "move"]))
        if what == "value" and path.suffix == ".jsonl":
            try:
                lines[number] = with_odd_value(lines[number], draw)
            except ValueError:  # changed before
                lines[number] = draw(st.sampled_from(ODD))
        elif what == "value":
            fields = lines[number].split(",")
            fields[draw(st.integers(0, len(fields) - 1))] = draw(st.sampled_from(ODD))
            lines[number] = ",".join(fields)
        elif what == "cut":
            lines[number] = lines[number][: draw(st.integers(0, 80))]
        elif what == "repeat":
            lines.append(lines[number])
        else:
            lines.insert(0, lines.pop(number))
    return "\n".join(lines).encode(errors="surrogatepass")


@MANY
@given(data=odd_files())
def test_a_file_with_odd_values_is_read_or_refused(tmp_path, data):
    path = tmp_path / "trace"
    path.write_bytes(data)
    read(path)


@MANY
@given(data=st.data(), seed=st.sampled_from(SEEDS))
def test_a_fixture_with_changed_bytes_is_read_or_refused(tmp_path, data, seed):
    contents = bytearray(seed.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(contents)))
        end = data.draw(st.integers(begin, min(len(contents), begin + 9)))
        contents[begin:end] = data.draw(st.binary(max_size=9))
    path = tmp_path / "trace"
    path.write_bytes(contents)
    read(path)


@MANY
@given(data=st.binary(max_size=200), start=st.sampled_from(STARTS))
def test_any_bytes_are_read_or_refused(tmp_path, data, start):
    path = tmp_path / "trace"
    path.write_bytes(start + data)
    read(path)


@pytest.mark.parametrize("name", [path.name for path in SEEDS])
def test_every_unchanged_fixture_is_read(name):
    assert read(next(path for path in SEEDS if path.name == name)) is not None


def stored(blocks: list[int], parent: int | None) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent}
    return event | {"token_ids": [], "block_size": 16}


ENDLESS = {
    "blocks below themselves": [[1, [stored([1], 1)]]],
    "blocks in a cycle": [[1, [stored([2], 1)]], [2, [stored([1], 2)]], [99, [stored([3], 1)]]],
    "blocks in a cycle of one event": [[1, [stored([1, 2, 1], None)]], [99, [stored([3], 1)]]],
    "many turns that repeat all earlier ones": [
        {"session_id": n % 2, "timestamp": n, "input_length": n + 1, "output_length": 1}
        for n in range(3000)
    ],
    "a chain of blocks, each stored alone": [[100 * n, [stored([n], n - 1)]] for n in range(3000)],
    "a conversation of many answers": [
        {"conversations": [{"from": "human", "value": "x" * 9000}]
         + [{"from": "gpt", "value": "y" * 900}] * 1000}
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_file_that_needs_unbounded_work_or_memory_is_refused(tmp_path, name):
    assert read(write_lines(tmp_path / "trace", ENDLESS[name])) is None


def test_a_gzip_bomb_split_over_many_members_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(b" " * (1 << 19)) * 5)
    assert read(path) is None


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_ten_minutes_of_coverage_guided_fuzzing_find_nothing():
    command = [sys.executable, "-m", "tests.fuzz.fuzz_readers", "600"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
