"""HiCacheStore inside SGLang: pages that one process stored are read into another's host pools.

SGLang needs other versions of packages than this project, so it has an environment of its own
(`sglang_env.sh DIR` builds it); `HICACHE_SGLANG_PYTHON` names its interpreter.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from storage_servers import redis_server

import hicache

SCRIPT = Path(__file__).with_name("sglang_pools.py")
PYTHON = os.environ.get("HICACHE_SGLANG_PYTHON") or (
    sys.executable if importlib.util.find_spec("sglang") else None
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None,
        reason="SGLang is not importable here and HICACHE_SGLANG_PYTHON names no interpreter "
        "where it is (tests/storage/sglang_env.sh DIR makes one)",
    ),
]


def process(what: str, kind: str, root: str) -> "subprocess.CompletedProcess[str]":
    assert PYTHON is not None
    return subprocess.run(
        [PYTHON, str(SCRIPT), what, kind, root],
        env={**os.environ, "PYTHONPATH": str(Path(hicache.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )


def succeeds(what: str, kind: str, root: str) -> None:
    done = process(what, kind, root)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_second_process_reads_the_pages_of_every_pool(kind, tmp_path):
    succeeds("write", kind, str(tmp_path))
    succeeds("read", kind, str(tmp_path))


def test_a_second_process_reads_pages_through_redis(tmp_path):
    if importlib.util.find_spec("redis") is None or shutil.which("redis-server") is None:
        pytest.skip("redis-server or redis-py is not installed")
    with redis_server(tmp_path) as server:
        done = process("write", "redis", server.url)
        if "redis-py" in done.stderr:
            pytest.skip("redis-py is not installed beside SGLang (pip install redis hiredis)")
        assert done.returncode == 0, done.stderr
        succeeds("read", "redis", server.url)


def test_pages_of_another_layout_are_misses(tmp_path):
    succeeds("write", "slab", str(tmp_path))
    succeeds("misfit", "slab", str(tmp_path))


def test_the_reading_process_fails_if_pages_are_missing(tmp_path):
    assert process("read", "slab", str(tmp_path)).returncode != 0


def test_the_reading_process_fails_if_a_byte_is_wrong(tmp_path):
    succeeds("write", "slab", str(tmp_path))
    done = process("spoil", "slab", str(tmp_path))
    assert "page 0 of kv differs" in done.stderr
