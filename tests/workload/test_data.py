"""Where trace files are looked for, and how published ones are downloaded."""

import hashlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hicache.workload.data import TRACES, Source, find_trace

CONTENTS = b"the trace\n"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user without data."""
    monkeypatch.delenv("HICACHE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "hicache.workload.data.user_cache_path", lambda name: tmp_path / "cache" / name
    )
    return tmp_path / "cache" / "hicache"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a trace on a local server."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "mine.jsonl").write_bytes(CONTENTS)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/mine.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


def find(path: Path | None = None, data_dir: Path | str | None = None, **more: str) -> Path:
    source = Source(kind="mine", names=("mine.gz", "mine.jsonl"), obtain="ask its author", **more)
    told = [None if each is None else str(each) for each in (path, data_dir)]
    return find_trace(source, path=told[0], data_dir=told[1])


def test_a_trace_is_looked_for_in_path_data_dir_environment_and_cache(
    tmp_path, monkeypatch, user_cache
):
    monkeypatch.setenv("HICACHE_DATA", str(tmp_path / "environment"))
    directory = tmp_path / "directory"
    for folder, data_dir in (
        (user_cache, None),
        (tmp_path / "environment", None),
        (directory, directory),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("mine.jsonl", "mine.gz"):  # the first name of the source is preferred
            (folder / name).touch()
            assert find(data_dir=data_dir) == folder / name
    path = directory / "elsewhere.jsonl"
    path.touch()
    assert find(path, directory) == path


@pytest.mark.parametrize("given", [True, False])
def test_a_pipe_in_place_of_a_trace_is_refused_unread(tmp_path, given):
    os.mkfifo(tmp_path / "mine.jsonl")
    with pytest.raises(ValueError, match=r"mine\.jsonl is a pipe or a device, and a trace is read"):
        find(tmp_path / "mine.jsonl" if given else None, None if given else tmp_path)


def test_a_missing_trace_is_an_error_that_says_where_it_was_looked_for(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"a file of yours: set workload\.path to it$"):
        find_trace(TRACES["trace"], path=None, data_dir=None)
    with pytest.raises(FileNotFoundError, match=r"workload\.path: .*gone.* does not exist.*ask"):
        find(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"data_dir .*: directory .*gone does not exist"):
        find(data_dir=tmp_path / "gone")
    monkeypatch.setenv("HICACHE_DATA", f"{tmp_path}/")
    looked = rf"not in {tmp_path} or {tmp_path}/cache/hicache: ask its author"
    with pytest.raises(FileNotFoundError, match=looked):
        find(data_dir=tmp_path)


def test_a_published_trace_is_downloaded_once(url, tmp_path):
    for _ in range(2):
        found = find(url=url, sha256=hashlib.sha256(CONTENTS).hexdigest())
        assert found.read_bytes() == CONTENTS
        (tmp_path / "published" / "mine.jsonl").unlink(missing_ok=True)


def test_a_download_that_fails_or_has_other_contents_is_refused(url):
    with pytest.raises(ValueError, match="hash"):
        find(url=url, sha256="0" * 64)
    nowhere = "http://127.0.0.1:9/mine.jsonl"  # the discard port, which has no server
    with pytest.raises(FileNotFoundError, match=r"download failed \(ConnectionError\): ask its"):
        find(url=nowhere, sha256="0" * 64)
