"""Real servers on this machine; tests of a server that is not installed are skipped."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import pytest

START_ATTEMPTS = 300


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def process(
    command: Sequence[str], log: IO[bytes], stdio: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command, stdin=stdio, stdout=stdio or log, stderr=log) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for_port(port: int, running: "subprocess.Popen[bytes]") -> None:
    for _ in range(START_ATTEMPTS):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        # the server says nothing that could be waited for
        with suppress(subprocess.TimeoutExpired):
            running.wait(0.05)
            break
    raise RuntimeError(f"{running.args!r} does not listen on port {port}")


class RedisServer(NamedTuple):
    """A server that keeps everything in memory."""

    url: str
    running: "subprocess.Popen[bytes]"


@contextmanager
def redis_server(
    directory: Path, *, port: int | None = None, memory: str = "256mb", policy: str = "allkeys-lru"
) -> Iterator[RedisServer]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    pytest.importorskip("redis", reason="redis-py is not installed (pip install -e '.[redis]')")
    port = free_port() if port is None else port
    options = f"--port {port} --bind 127.0.0.1 --appendonly no --maxmemory {memory}".split()
    options += ["--save", "", "--dir", str(directory), "--maxmemory-policy", policy]
    with (directory / "log").open("ab") as log, process([binary, *options], log) as running:
        wait_for_port(port, running)
        yield RedisServer(f"redis://127.0.0.1:{port}/0", running)


NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 * 2**20, 16 * 2**20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed {code}", flush=True)
sys.stdin.read()
"""


class MooncakeCluster(NamedTuple):
    """A master and one storage node of 256 MiB."""

    master: str
    master_process: "subprocess.Popen[bytes]"
    node_process: "subprocess.Popen[bytes]"


@contextmanager
def mooncake_cluster(directory: Path) -> Iterator[MooncakeCluster]:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed (pip install -e '.[mooncake-cpu]')")
    binary = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if binary is None:
        pytest.skip("mooncake_master is not installed beside this Python")
    port = free_port()
    master = f"127.0.0.1:{port}"
    options = f"--rpc_address 127.0.0.1 --rpc_port {port} --metrics_host 127.0.0.1".split()
    options += ["--metrics_port", str(free_port()), "--logtostderr=true"]
    node_command = [sys.executable, "-c", NODE, master]
    with (directory / "log").open("ab") as log, process([binary, *options], log) as master_process:
        wait_for_port(port, master_process)
        with process(node_command, log, subprocess.PIPE) as node_process:
            assert node_process.stdout is not None
            assert b"ready" in node_process.stdout.readline()
            yield MooncakeCluster(master, master_process, node_process)
