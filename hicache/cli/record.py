"""Record a running SGLang or vLLM server as a trace, without any text or token.

hicache record DIR --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
hicache record DIR --log /var/log/sglang/requests.log --metrics http://127.0.0.1:30000/metrics
python record.py DIR --events tcp://127.0.0.1:5557     (this file alone, beside the engine)

The file needs Python and pyzmq and msgspec, which both engines bring. It writes to DIR:

- events-N.jsonl: the KV events (`--kv-events-config`), read by `workload.path=` as they are;
- requests-N.jsonl: SGLang's request log (`--log-requests-format json`), one request per row;
- counters.jsonl: sums of the server's Prometheus counters;
- recording.json: what was seen, and what was not.

Hashes of blocks, sessions, salts and adapters are hashed with a random key, and token ids and texts
are left out. The key lies in DIR/key while a recording may go on; delete it at the end. A recorder
that is started again in DIR goes on with the next number of events. Messages that it did not get
are asked for at --replay; numbers that the server no longer has are counted as lost.
"""

import argparse
import hashlib
import json
import os
import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_TOKENS = 16  # of the rows of requests
JUMP_S = 5.0  # a server's clock that moves so much more or less than ours has jumped
REPLAY_S = 5.0  # longest wait for lost messages
END = (1 << 64) - 1  # number that ends a replay
NAMES = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
KEPT = ("type", "block_size", "medium", "group_idx", "kv_cache_spec_kind", "locality", "ownership")
HASHED = ("lora_id", "lora_name", "cache_salt", "session_id")
COUNTS = (
    *("starts", "batches", "events", "replayed_batches", "lost_batches", "bad_batches"),
    *("server_restarts", "clock_jumps", "unwritten_lines", "events_lines", "requests_lines"),
    *("requests_without_tokens", "bad_log_lines"),
)


class Files:
    """JSON lines in numbered files, which never hold a part of a line.

    A line that cannot be written, as on a full disk, is dropped and counted.
    """

    def __init__(self, folder: Path, stem: str, most_bytes: int, counts: dict[str, int]) -> None:
        self._folder, self._stem, self._most, self._counts = folder, stem, most_bytes, counts
        found = [int(each.stem.rpartition("-")[2]) for each in folder.glob(f"{stem}-*.jsonl")]
        self._number = max(found, default=0)
        self._file: BinaryIO | None = None

    def write(self, row: object) -> None:
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        end = None
        try:
            if self._file is None or self._file.tell() + len(line) > self._most:
                self.close()
                self._number += 1
                path = self._folder / f"{self._stem}-{self._number:06}.jsonl"
                self._file = path.open("xb", buffering=0)
            end = self._file.tell()
            if self._file.write(line) < len(line):
                raise OSError("the disk is full")
            self._counts[f"{self._stem}_lines"] += 1
        except OSError:
            self._counts["unwritten_lines"] += 1
            if self._file is not None and end is not None:
                self._file.truncate(end)
                self._file.seek(end)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class Recording:
    """What was recorded in a folder, and what could not be seen; it survives restarts."""

    def __init__(self, folder: Path, most_bytes: int = 64 << 20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        key = folder / "key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(32))
        self._key = key.read_bytes()
        state = folder / "recording.json"
        held = json.loads(state.read_text()) if state.exists() else {}
        self.counts: dict[str, int] = {each: held.get("counts", {}).get(each, 0) for each in COUNTS}
        self.counts["starts"] += 1
        self.next: dict[str, int] = held.get("next", {})  # by server: number of its next batch
        self._offsets: dict[str, float] = held.get("offsets", {})  # by server: seconds of jumps
        self._clocks: dict[str, tuple[float, float]] = {}  # by server: its time, and ours
        self.log_place: list[int] = held.get("log_place", [0, 0])  # inode and bytes read
        self.counters: dict[str, float] = held.get("counters", {})  # the latest value
        self.counted: dict[str, float] = held.get("counted", {})  # the increase while recorded
        self.events = Files(folder, "events", most_bytes, self.counts)
        self.requests = Files(folder, "requests", most_bytes, self.counts)

    def hashed(self, value: object) -> str | None:
        if value is None or value == "":
            return None
        plain = value if isinstance(value, bytes) else str(value).encode()
        return hashlib.blake2b(plain, key=self._key, digest_size=8).hexdigest()

    def batch(self, server: str, number: int, payload: bytes, now_s: float | None) -> None:
        """Take a batch of KV events; `now_s` is our monotonic time, None if it was replayed."""
        import msgspec

        try:
            told = msgspec.msgpack.decode(payload)
            sent_s, events = float(told[0]), [self._event(each) for each in told[1]]
        except (ValueError, TypeError, LookupError, msgspec.MsgspecError):
            self.counts["bad_batches"] += 1
            return
        if now_s is not None:
            before = self._clocks.get(server)
            self._clocks[server] = sent_s, now_s
            jump = 0.0 if before is None else (sent_s - before[0]) - (now_s - before[1])
            if abs(jump) > JUMP_S:
                self.counts["clock_jumps"] += 1
                self._offsets[server] = self._offsets.get(server, 0.0) + jump
        self.counts["batches"] += 1
        self.counts["events"] += len(events)
        self.events.write([round(sent_s - self._offsets.get(server, 0.0), 6), events])

    def _event(self, told: Any) -> dict[str, object]:
        # an object, or an array of its type and its fields
        if not isinstance(told, dict):
            plain = [each for each in told[1:] if not isinstance(each, dict)]
            maps = (each for each in told[1:] if isinstance(each, dict))
            told = {"type": told[0], **dict(zip(NAMES, plain, strict=False))}
            for each in maps:
                told |= each
        found: dict[str, object] = {name: told[name] for name in KEPT if told.get(name) is not None}
        found |= {name: x for name in HASHED if (x := self.hashed(told.get(name))) is not None}
        if "block_hashes" in told:
            found["block_hashes"] = [self.hashed(each) for each in told["block_hashes"]]
            found["parent_block_hash"] = self.hashed(told.get("parent_block_hash"))
        if told.get("extra_keys"):
            found["extra_keys"] = [self.hashed(x and repr(x)) for x in told["extra_keys"]]
        return found

    def logged(self, line: bytes) -> None:
        """Take a line of SGLang's request log; lines of other events are passed over."""
        try:
            told = json.loads(line)
            if told.get("event") != "request.finished":
                return
            asked, out = told["obj"], told["out"]
            meta = out["meta_info"]
            ended_s = datetime.fromisoformat(told["timestamp"]).timestamp()
            row = {
                "timestamp": round(1000 * (ended_s - meta.get("e2e_latency", 0.0))),
                "input_length": int(meta["prompt_tokens"]),
                "output_length": int(meta["completion_tokens"]),
            }
            tokens = asked.get("input_ids")
            if tokens and len(tokens) == row["input_length"]:
                space = [asked.get(each) for each in ("lora_path", "extra_key", "cache_salt")]
                row["hash_ids"] = [*self._blocks(tokens)]
                if any(space):
                    row["namespace"] = self.hashed(repr(space))
            else:
                self.counts["requests_without_tokens"] += 1
        except (ValueError, TypeError, LookupError, AttributeError):
            self.counts["bad_log_lines"] += 1
            return
        self.requests.write(row)

    def _blocks(self, tokens: list[int]) -> Iterator[str]:
        digest = b""
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            block = digest + repr(tokens[begin : begin + BLOCK_TOKENS]).encode()
            digest = hashlib.blake2b(block, key=self._key, digest_size=8).digest()
            yield digest.hex()

    def scraped(self, text: str) -> None:
        """Take a page of Prometheus; the values of a counter are summed over its labels."""
        sums: dict[str, float] = {}
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if not line.startswith("#") and name.endswith(("_total", "_count", "_sum")):
                sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
        for name, value in sums.items():
            before = self.counters.get(name)
            if before is not None:  # after a restart of the server, it counts from 0
                more = value - before if value >= before else value
                self.counted[name] = self.counted.get(name, 0.0) + more
        self.counters = sums

    def save(self) -> None:
        """Write what was seen to recording.json, and the counters to counters.jsonl."""
        state = {
            "counts": self.counts,
            "lost": self.sentences(),
            "next": self.next,
            "offsets": self._offsets,
            "log_place": self.log_place,
            "counters": self.counters,
            "counted": self.counted,
        }
        try:
            new = self.folder / "recording.new"
            new.write_text(json.dumps(state, indent=1))
            new.replace(self.folder / "recording.json")
        except OSError:  # the disk is full: the next call tries again
            self.counts["unwritten_states"] = self.counts.get("unwritten_states", 0) + 1

    def sentences(self) -> list[str]:
        """Say what the recording lacks."""
        count = self.counts
        told = {
            "lost_batches": "batches of events were lost, and the server no longer has them",
            "bad_batches": "batches of events could not be read",
            "server_restarts": "restarts of a server: its last batches before may be missing, and "
            "its cache was empty",
            "clock_jumps": "jumps of a server's clock: later times are corrected by the jump",
            "unwritten_lines": "lines could not be written (disk full)",
            "bad_log_lines": "lines of the request log could not be read",
            "requests_without_tokens": "requests were logged without token ids, so that their "
            "prefixes are unknown (send input_ids, --log-requests-level 3)",
        }
        found = [f"{count[name]:,} {what}" for name, what in told.items() if count[name]]
        if count["starts"] > 1:
            found.append(f"the recorder was started {count['starts']} times")
        served = sum(x for name, x in self.counted.items() if "num_requests_total" in name)
        if served > count["requests_lines"] > 0:
            found.append(
                f"the server counted {served:,.0f} requests, and the recording has "
                f"{count['requests_lines']:,}"
            )
        return found


class Subscriber:
    """Gets the batches of one server in order, and asks for those that are missing."""

    def __init__(self, recording: Recording, events: str, replay: str | None) -> None:
        import zmq

        self._recording, self._server, self._replay_at = recording, events, replay
        self._zmq: Any = zmq.Context.instance()
        self.socket = self._zmq.socket(zmq.SUB)
        self.socket.set_hwm(0)
        self.socket.subscribe(b"")
        self.socket.connect(events)
        if replay is not None:  # what was sent while no recorder ran
            self._replayed(recording.next.get(events, 0), None)

    def take(self) -> None:
        """Take the next message."""
        frames = self.socket.recv_multipart()
        if len(frames) < 2:
            self._recording.counts["bad_batches"] += 1
            return
        number, expected = int.from_bytes(frames[-2], "big"), self._recording.next.get(self._server)
        if expected is not None and number < expected:
            self._recording.counts["server_restarts"] += 1
            expected = 0
        if expected is not None and number > expected:
            self._replayed(expected, number)
        self._take(number, frames[-1], time.monotonic())

    def _take(self, number: int, payload: bytes, now_s: float | None) -> None:
        self._recording.batch(self._server, number, payload, now_s)
        self._recording.next[self._server] = number + 1

    def _replayed(self, begin: int, end: int | None) -> None:
        """Ask for the batches [begin, end), or all from `begin` on; count those that are gone."""
        recording = self._recording
        for number, payload in self._answers(begin):
            if number < begin or (end is not None and number >= end):
                continue
            recording.counts["lost_batches"] += number - begin
            recording.counts["replayed_batches"] += 1
            self._take(number, payload, None)
            begin = number + 1
        if end is not None:
            recording.counts["lost_batches"] += end - begin

    def _answers(self, begin: int) -> list[tuple[int, bytes]]:
        import zmq

        found: list[tuple[int, bytes]] = []
        if self._replay_at is None:
            return found
        socket = self._zmq.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 0
        socket.connect(self._replay_at)
        socket.send_multipart([b"", begin.to_bytes(8, "big")])
        while socket.poll(1000 * REPLAY_S):
            frames = socket.recv_multipart()
            if len(frames) < 2:
                self._recording.counts["bad_batches"] += 1
                continue
            number = int.from_bytes(frames[-2], "big")
            if number == END:
                break
            found.append((number, frames[-1]))
        socket.close()
        return found


def new_lines(path: Path, place: list[int]) -> Iterator[bytes]:
    """Yield the whole lines of a log after `place`, and move it: [inode, bytes read].

    A log that was rotated is read from its start.
    """
    try:
        with path.open("rb") as file:
            inode, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
            if place[0] != inode or size < place[1]:
                place[:] = [inode, 0]
            file.seek(place[1])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                place[1] += len(line)
                yield line
    except OSError:
        return


def record(options: argparse.Namespace) -> Recording:
    """Record until the time is over, or a signal ends the program."""
    recording = Recording(options.folder, options.rotate_mib << 20)
    replays = [*options.replay, *[None] * (len(options.events) - len(options.replay))]
    subscribers = [
        Subscriber(recording, *each) for each in zip(options.events, replays, strict=True)
    ]
    begin = saved = time.monotonic()
    stopped: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: stopped.append(number))
    while not stopped and time.monotonic() - begin < options.seconds:
        is_idle = True
        for subscriber in subscribers:
            if subscriber.socket.poll(20):
                is_idle = False
                subscriber.take()
        for line in new_lines(options.log, recording.log_place) if options.log else ():
            is_idle = False
            recording.logged(line)
        if is_idle and not subscribers:
            time.sleep(0.1)
        if time.monotonic() - saved >= options.every:
            saved = time.monotonic()
            _scrape(recording, options.metrics)
            recording.save()
    _scrape(recording, options.metrics)
    recording.save()
    for files in (recording.events, recording.requests):
        files.close()
    return recording


def _scrape(recording: Recording, address: str | None) -> None:
    if address is None:
        return
    try:
        with urllib.request.urlopen(address, timeout=2) as page:
            recording.scraped(page.read().decode())
        with (recording.folder / "counters.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **recording.counters}) + "\n")
    except (OSError, ValueError):
        count = recording.counts.get("missed_scrapes", 0)
        recording.counts["missed_scrapes"] = count + 1


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="hicache record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="where the recording lies")
    add("--events", action="append", default=[], help="address of KV events; once per server")
    add("--replay", action="append", default=[], help="address of lost messages, in that order")
    add("--log", type=Path, help="SGLang's request log in JSON")
    add("--metrics", help="address of the Prometheus page")
    add("--seconds", type=float, default=float("inf"), help="when to stop; by default at Ctrl-C")
    add("--every", type=float, default=10.0, help="seconds between counters")
    add("--rotate-mib", type=int, default=64, help="size of a file")
    options = parser.parse_args(arguments if arguments is None else [*arguments])
    if not (options.events or options.log) or len(options.replay) > len(options.events):
        parser.error("give --events or --log, and at most one --replay for each --events")
    recording = record(options)
    sys.stderr.write(
        "\n".join([f"{options.folder}: {recording.counts}", *recording.sentences()]) + "\n"
    )


if __name__ == "__main__":
    main()
