import hashlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hicache.workload.data import TRACES, Source, find_trace

HERE = Source(kind="mine", names=("mine.gz", "mine.jsonl"), obtain="ask its author")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees this machine's data."""
    monkeypatch.delenv("HICACHE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hicache.workload.data.os_cache", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "hicache"


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """A trace on a local server: its address and its contents."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "trace.jsonl").write_bytes(b"the trace\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/trace.jsonl", b"the trace\n"
    server.shutdown()
    thread.join()
    server.server_close()


def _make(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).touch()
    return directory / name


def test_a_given_path_is_taken(tmp_path: Path) -> None:
    path = _make(tmp_path, "elsewhere.jsonl")
    assert find_trace(HERE, path=str(path), data_dir=None) == path


@pytest.mark.parametrize("given", [True, False])
def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path, *, given: bool) -> None:
    os.mkfifo(tmp_path / "mine.jsonl")
    place = {"path": str(tmp_path / "mine.jsonl")} if given else {"data_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=r"mine\.jsonl is a pipe or a device, and a trace is read"):
        find_trace(HERE, **{"path": None, "data_dir": None, **place})


def test_a_given_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"workload\.path: .*gone.* does not exist.*ask its"
    ):
        find_trace(HERE, path=str(tmp_path / "gone"), data_dir=None)


def test_the_data_directory_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path / "environment", "mine.gz")
    wanted = _make(tmp_path / "directory", "mine.jsonl")
    monkeypatch.setenv("HICACHE_DATA", str(tmp_path / "environment"))
    assert find_trace(HERE, path=None, data_dir=str(tmp_path / "directory")) == wanted


def test_the_environment_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_cache: Path
) -> None:
    _make(user_cache, "mine.gz")
    wanted = _make(tmp_path / "environment", "mine.jsonl")
    monkeypatch.setenv("HICACHE_DATA", str(tmp_path / "environment"))
    assert find_trace(HERE, path=None, data_dir=None) == wanted


def test_the_first_name_is_preferred(tmp_path: Path) -> None:
    _make(tmp_path, "mine.jsonl")
    wanted = _make(tmp_path, "mine.gz")
    assert find_trace(HERE, path=None, data_dir=str(tmp_path)) == wanted


def test_a_missing_trace_says_once_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_DATA", f"{tmp_path}/")
    looked = rf"not in {tmp_path} or {tmp_path}/cache/hicache: ask its author"
    with pytest.raises(FileNotFoundError, match=looked):
        find_trace(HERE, path=None, data_dir=str(tmp_path))


def test_a_file_of_the_user_is_looked_for_nowhere() -> None:
    with pytest.raises(FileNotFoundError, match=r"a file of yours: set workload\.path to it$"):
        find_trace(TRACES["trace"], path=None, data_dir=None)


def test_a_published_trace_is_downloaded_once(published: tuple[str, bytes]) -> None:
    url, contents = published
    digest = hashlib.sha256(contents).hexdigest()
    source = Source(kind="mine", names=("trace.jsonl",), obtain="", url=url, sha256=digest)
    found = find_trace(source, path=None, data_dir=None)
    assert found.read_bytes() == contents
    assert find_trace(source, path=None, data_dir=None) == found


def test_a_download_of_other_contents_is_refused(published: tuple[str, bytes]) -> None:
    url, _ = published
    source = Source(kind="mine", names=("trace.jsonl",), obtain="", url=url, sha256="0" * 64)
    with pytest.raises(ValueError, match="hash"):
        find_trace(source, path=None, data_dir=None)


def test_a_failed_download_says_how_to_get_the_trace() -> None:
    source = Source(
        kind="mine",
        names=("trace.jsonl",),
        obtain="ask its author",
        url="http://127.0.0.1:9/trace.jsonl",  # the discard port: nobody listens
        sha256="0" * 64,
    )
    with pytest.raises(FileNotFoundError, match=r"download failed \(ConnectionError\): ask its"):
        find_trace(source, path=None, data_dir=None)


def test_a_data_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data_dir .*: directory .*gone does not exist"):
        find_trace(HERE, path=None, data_dir=str(tmp_path / "gone"))
