"""Real servers on the loopback, for engines that need one; absent servers skip their tests."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import pytest

START_ATTEMPTS = 300


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def process(command: Sequence[str], log: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for_port(port: int, running: "subprocess.Popen[bytes]") -> None:
    for _ in range(START_ATTEMPTS):
        if running.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        # the server says nothing that could be waited for
        try:
            running.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError(f"{running.args!r} does not listen on port {port}")


@dataclass(frozen=True)
class RedisServer:
    """A server that keeps everything in memory."""

    url: str
    running: "subprocess.Popen[bytes]"

    @classmethod
    @contextmanager
    def started(cls, directory: Path, *, port: int | None = None, memory: str = "256mb",
                policy: str = "allkeys-lru") -> Iterator[Self]:  # fmt: skip
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        if importlib.util.find_spec("redis") is None:
            pytest.skip("redis-py is not installed (pip install -e '.[redis]')")
        port = free_port() if port is None else port
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(directory), "--maxmemory", memory,
                   "--maxmemory-policy", policy]  # fmt: skip
        with (directory / "log").open("ab") as log, process(command, log) as running:
            wait_for_port(port, running)
            yield cls(f"redis://127.0.0.1:{port}/0", running)

    def stop(self) -> None:
        """Let it answer nobody, without closing a connection."""
        self.running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.running.send_signal(signal.SIGCONT)


NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 * 2**20, 16 * 2**20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed {code}", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class MooncakeCluster:
    """A master and one storage node of 256 MiB."""

    master: str
    master_process: "subprocess.Popen[bytes]"
    node_process: "subprocess.Popen[bytes]"

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Self]:
        if importlib.util.find_spec("mooncake") is None:
            pytest.skip("Mooncake is not installed (pip install -e '.[mooncake-cpu]')")
        binary = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.defpath}")
        if binary is None:
            pytest.skip("mooncake_master is not installed beside this Python")
        port, metrics_port = free_port(), free_port()
        master = f"127.0.0.1:{port}"
        command = [binary, "--rpc_address", "127.0.0.1", "--rpc_port", str(port),
                   "--metrics_host", "127.0.0.1", "--metrics_port", str(metrics_port),
                   "--logtostderr=true"]  # fmt: skip
        with ExitStack() as stack:
            log = stack.enter_context((directory / "log").open("ab"))
            master_process = stack.enter_context(process(command, log))
            wait_for_port(port, master_process)
            node_process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", NODE, master],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )
            stack.callback(node_process.kill)
            assert node_process.stdout is not None
            assert b"ready" in node_process.stdout.readline()
            yield cls(master, master_process, node_process)
