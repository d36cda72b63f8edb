"""Finds trace files, and downloads public ones."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

CONNECT_S = 5.0
READ_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Describes where to find a trace on disk, and how to get the trace if it is missing.

    `names` lists files or folders that a data directory may hold, the preferred one first. A trace
    with `url` and `sha256` can be downloaded. `obtain` tells the user how to get the trace by hand.
    """

    kind: str
    names: tuple[str, ...]
    obtain: str
    url: str | None = None
    sha256: str | None = None


RELEASE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces"
MOONCAKE_SHA256 = {
    "conversation": "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    "synthetic": None,
    "toolagent": "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
}


def _mooncake(name: str, sha256: str | None) -> Source:
    file, kept = f"{name}_trace.jsonl", f"mooncake_{name}.jsonl"
    url = f"{RELEASE}/{file}"
    return Source(
        kind=f"mooncake_{name}",
        names=(f"{kept}.gz", kept, file),
        obtain=f"download {url}",
        url=url,
        sha256=sha256,
    )


SOURCES = (
    *itertools.starmap(_mooncake, MOONCAKE_SHA256.items()),
    Source(
        kind="weka_agentic",
        names=(
            "weka_agentic_coding.packed.jsonl.gz",
            "weka_agentic_coding.dev.packed.jsonl.gz",
            "weka_agentic_coding/traces",
            "kv-cache-tester/traces",
        ),
        obtain="clone https://github.com/callanjfox/kv-cache-tester",
    ),
    Source(kind="trace", names=(), obtain="set workload.path to it"),
)
TRACES = {source.kind: source for source in SOURCES}


def find_trace(source: Source, *, path: str | None, data_dir: str | None) -> Path:
    """Return the path of a trace on disk; download the trace if it is not there.

    If `path` is given, the function returns it unchanged. If `path` is None, the function searches
    `data_dir`, then the directory in the environment variable HICACHE_DATA, then the user's cache
    directory. If the trace is in none of them and has a known URL, it is downloaded to the cache
    directory.

    Raises:
        FileNotFoundError: the trace or `data_dir` does not exist. The message says how to get
            the trace.
        ValueError: the download has a wrong SHA-256, or `path` is a pipe or a device.
    """
    found = _find(source, path=path, data_dir=data_dir)
    if not (found.is_file() or found.is_dir()):
        raise ValueError(
            f"workload.path: {found} is a pipe or a device, and a trace is read more than once: "
            f"write it to a file first"
        )
    return found


def _find(source: Source, *, path: str | None, data_dir: str | None) -> Path:
    if path is not None:
        if not Path(path).exists():
            how = f"; to get this trace, {source.obtain}" if source.names else ""
            raise FileNotFoundError(f"workload.path: {path} does not exist{how}")
        return Path(path)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(
            f"data_dir (by default HICACHE_DATA): directory {data_dir} does not exist"
        )
    if not source.names:
        raise FileNotFoundError(f"workload={source.kind} reads a file of yours: {source.obtain}")
    cache = user_cache_path("hicache")
    named = (data_dir, os.environ.get("HICACHE_DATA"), cache)
    looked = list(dict.fromkeys(Path(directory) for directory in named if directory))
    for directory in looked:
        for name in source.names:
            if (directory / name).exists():
                return directory / name
    failure = ""
    if source.url is not None and source.sha256 is not None:
        try:
            return _download(source.url, source.sha256, cache)
        except OSError as error:  # the HTTP library's errors are all OSErrors
            failure = f" and its download failed ({type(error).__name__})"
    raise FileNotFoundError(
        f"the trace of workload={source.kind} is not in "
        f"{' or '.join(str(directory) for directory in looked)}{failure}: {source.obtain}, then "
        f"set data_dir or HICACHE_DATA to its directory, or workload.path to the file"
    )


def _download(url: str, sha256: str, cache: Path) -> Path:
    from pooch.core import retrieve  # its progress bar takes time to import
    from pooch.downloaders import HTTPDownloader

    # the default is to wait 30 s for a connection, too long on a machine without network
    downloader = HTTPDownloader(timeout=(CONNECT_S, READ_S))  # type: ignore[no-untyped-call]
    name = url.rsplit("/", maxsplit=1)[-1]
    return Path(retrieve(url, f"sha256:{sha256}", fname=name, path=cache, downloader=downloader))
