"""Record a running SGLang or vLLM server as a trace, without any text or token.

hicache record DIR --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
hicache record DIR --log /var/log/sglang/requests.log --metrics http://127.0.0.1:30000/metrics
python record.py DIR --events tcp://127.0.0.1:5557     (this file alone, beside the engine)

The file needs Python and pyzmq and msgspec, which both engines bring. It writes to DIR:

- events/N.jsonl: the KV events (`--kv-events-config`), read by `workload.path=DIR/events`;
- requests/N.jsonl: SGLang's request log (`--log-requests-format json`), one request per row;
- counters.jsonl: sums of the server's Prometheus counters;
- recording.json: what was seen, and what was not.

Hashes of blocks, sessions, salts and adapters are hashed with a random key, and token ids and texts
are left out. The key lies in DIR/key while a recording may go on; delete it at the end. A recorder
that is started again in DIR, even after kill -9, continues after the last line that it wrote.
Messages that it did not get are asked for at --replay; numbers that the server no longer has are
counted as lost.
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
REPLAY_S = 2.0  # longest wait for lost messages
END = (1 << 64) - 1  # number that ends a replay
# of events that are arrays, as those of vLLM 0.23 are, in order
STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    *("locality", "ownership", "session_id"),
)
REMOVED = ("block_hashes", "medium", "group_idx")
KEPT = ("type", "block_size", "medium", "group_idx", "kv_cache_spec_kind", "locality", "ownership")
HASHED = ("lora_id", "lora_name", "cache_salt", "session_id")
SEEN = ("starts", "batches", "events", "replayed_batches", "events_lines", "requests_lines")
FAULTS = {  # what a recording may lack, in words
    "lost_batches": "batches of events were lost, and the server no longer has them",
    "bad_batches": "batches of events could not be read",
    "server_restarts": "restarts of a server: its last batches before may be missing, and its "
    "cache was empty",
    "clock_jumps": "jumps of a server's clock: later times are corrected by the jump",
    "unwritten_lines": "lines could not be written (disk full)",
    "unwritten_states": "times recording.json could not be written",
    "bad_log_lines": "lines of the request log could not be read",
    "lost_logs": "times the log that was read last was gone, and perhaps requests with it",
    "requests_without_tokens": "requests were logged without token ids, so that their prefixes "
    "are unknown (send input_ids, --log-requests-level 3)",
    "missed_scrapes": "pages of counters could not be read or written",
}


class Files:
    """JSON lines in numbered files, which never hold a part of a line.

    A line that cannot be written, as on a full disk, is dropped and counted.
    """

    def __init__(self, folder: Path, stem: str, most_bytes: int, counts: dict[str, int]) -> None:
        self._folder, self._stem, self._most, self._counts = folder / stem, stem, most_bytes, counts
        self._folder.mkdir(parents=True, exist_ok=True)
        self.number = max((number for number, _ in self._found()), default=0)
        self._file: BinaryIO | None = None

    def _found(self) -> list[tuple[int, Path]]:
        return sorted((int(path.stem), path) for path in self._folder.glob("*.jsonl"))

    @property
    def place(self) -> list[int]:
        """The end of the last line: number of the file, and bytes."""
        return [self.number + 1, 0] if self._file is None else [self.number, self._file.tell()]

    def rows_after(self, place: list[int]) -> Iterator[Any]:
        """Yield the rows after a place, and cut off a part of a line."""
        for number, path in self._found():
            if number >= place[0]:
                lines = path.read_bytes()
                end = lines.rfind(b"\n") + 1
                os.truncate(path, end)
                begin = place[1] if number == place[0] else 0
                yield from map(json.loads, lines[begin:end].splitlines())

    def write(self, row: object) -> None:
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        end = None
        try:
            if self._file is None or self._file.tell() + len(line) > self._most:
                self.close()
                self.number += 1
                path = self._folder / f"{self.number:06}.jsonl"
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
        if not key.exists() or key.stat().st_size < 32:  # a full disk may have cut it
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(32))
        self._key = key.read_bytes()
        path = folder / "recording.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        self.counts: dict[str, int] = dict.fromkeys((*SEEN, *FAULTS), 0) | state.get("counts", {})
        # by server: number of its next batch, time of its last one, and seconds of jumps
        self.next: dict[str, int] = state.get("next", {})
        self.sent: dict[str, float] = state.get("sent", {})
        self._offsets: dict[str, float] = state.get("offsets", {})
        self._clocks: dict[str, tuple[float, float]] = {}  # by server: its time, and ours
        self.log_place: list[int] = state.get("log_place", [0, 0])  # inode and bytes read
        self.counters: dict[str, float] = state.get("counters", {})  # the latest value
        self.counted: dict[str, float] = state.get("counted", {})  # the increase while recorded
        self.events = Files(folder, "events", most_bytes, self.counts)
        self.requests = Files(folder, "requests", most_bytes, self.counts)
        self._recover(*state.get("files", [[0, 0], [0, 0]]))
        self.counts["starts"] += 1

    def _recover(self, events: list[int], requests: list[int]) -> None:
        """Continue after the last lines, which a recorder that was killed wrote after its state."""
        for at_s, batch, number, server, sent_s in self.events.rows_after(events):
            self.next[server], self.sent[server] = number + 1, sent_s
            self._offsets[server] = sent_s - at_s
            for name, more in (("batches", 1), ("events", len(batch)), ("events_lines", 1)):
                self.counts[name] += more
        for row in self.requests.rows_after(requests):
            self.log_place[:] = row["log_place"]
            self.counts["requests_lines"] += 1

    def hashed(self, value: object) -> str | None:
        if value is None or value == "":
            return None
        plain = value if isinstance(value, bytes) else str(value).encode()
        return hashlib.blake2b(plain, key=self._key, digest_size=8).hexdigest()

    def batch(self, server: str, number: int, payload: bytes, *, is_replayed: bool) -> None:
        """Take a batch of KV events."""
        import msgspec

        self.next[server] = number + 1
        try:
            told = msgspec.msgpack.decode(payload)
            sent_s, events = float(told[0]), [self._event(each) for each in told[1]]
        except (ValueError, TypeError, LookupError, msgspec.MsgspecError):
            self.counts["bad_batches"] += 1
            self.sent.pop(server, None)
            return
        at_s = round(sent_s - self._offset(server, sent_s, is_replayed=is_replayed), 6)
        self.sent[server] = sent_s
        self.counts["batches"] += 1
        self.counts["events"] += len(events)
        self.events.write([at_s, events, number, server, sent_s])

    def _offset(self, server: str, sent_s: float, *, is_replayed: bool) -> float:
        """Return the seconds that the server's clock has jumped, this batch included."""
        now_s = time.monotonic()
        sent_before_s, before_s = self._clocks.get(server, (sent_s, now_s))
        jump = (sent_s - sent_before_s) - (now_s - before_s)
        if is_replayed and jump < 0:  # it was sent at any time since
            jump = min(sent_s - sent_before_s, 0.0)
        if abs(jump) > JUMP_S:
            self.counts["clock_jumps"] += 1
            self._offsets[server] = self._offsets.get(server, 0.0) + jump
            self._clocks[server] = sent_before_s + jump, before_s
        if not is_replayed:
            self._clocks[server] = sent_s, now_s
        return self._offsets.get(server, 0.0)

    def _event(self, told: Any) -> dict[str, object]:
        # an object, or an array of its type and its fields
        if not isinstance(told, dict):
            plain = [each for each in told[1:] if not isinstance(each, dict)]
            maps = (each for each in told[1:] if isinstance(each, dict))
            names = REMOVED if told[0] == "BlockRemoved" else STORED
            told = {"type": told[0], **dict(zip(names, plain, strict=False))}
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
        """Take a line of SGLang's request log, at `log_place`; other lines are passed over."""
        if b'"request.finished"' not in line:
            return
        try:
            told = json.loads(line[line.index(b"{") :])  # after the time in brackets
            if told.get("event") != "request.finished":
                return
            asked, meta = told["obj"], told["out"]["meta_info"]
            ended_s = datetime.fromisoformat(told["timestamp"]).timestamp()
            row: dict[str, Any] = {
                "timestamp": round(1000 * (ended_s - meta.get("e2e_latency", 0.0))),
                "input_length": int(meta["prompt_tokens"]),
                "output_length": int(meta["completion_tokens"]),
            }
            tokens = asked.get("input_ids") or []
            if len(tokens) == row["input_length"] and "..." not in tokens:  # level 2 cuts them
                row["hash_ids"] = [*self._blocks(tokens)]
                space = [asked.get(each) for each in ("lora_path", "extra_key", "cache_salt")]
                if any(space):
                    row["namespace"] = self.hashed(repr(space))
            else:
                self.counts["requests_without_tokens"] += 1
        except (ValueError, TypeError, LookupError, AttributeError):
            self.counts["bad_log_lines"] += 1
            return
        self.requests.write(row | {"log_place": self.log_place})

    def _blocks(self, tokens: list[int]) -> Iterator[str]:
        digest = b""
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            block = digest + repr(tokens[begin : begin + BLOCK_TOKENS]).encode()
            digest = hashlib.blake2b(block, key=self._key, digest_size=8).digest()
            yield digest.hex()

    def scraped(self, text: str) -> None:
        """Take a page of Prometheus; the values of a counter are summed over its labels."""
        sums: dict[str, float] = {}
        kind = ""  # of the samples below its line
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                kind = line.split()[3]
            name = line.partition("{")[0].partition(" ")[0]
            ends = ("_count", "_sum") if kind in ("histogram", "summary") else "_total"
            if kind not in ("", "gauge") and not line.startswith("#") and name.endswith(ends):
                told = line.removeprefix(name).rpartition("}")[2].split()[0]
                sums[name] = sums.get(name, 0.0) + float(told)
        for name, value in sums.items():
            before = self.counters.get(name)
            if before is not None:  # after a restart of the server, it counts from 0
                more = value - before if value >= before else value
                self.counted[name] = self.counted.get(name, 0.0) + more
        self.counters = sums

    def save(self) -> None:
        """Write what was seen to recording.json."""
        state = {
            "counts": self.counts,
            "lost": self.sentences(),
            "next": self.next,
            "sent": self.sent,
            "offsets": self._offsets,
            "files": [self.events.place, self.requests.place],
            "log_place": self.log_place,
            "counters": self.counters,
            "counted": self.counted,
        }
        try:
            new = self.folder / "recording.new"
            new.write_text(json.dumps(state, indent=1))
            new.replace(self.folder / "recording.json")
        except OSError:  # the disk is full: the next call tries again
            self.counts["unwritten_states"] += 1

    @property
    def faults(self) -> dict[str, int]:
        return {name: self.counts[name] for name in FAULTS if self.counts[name]}

    def sentences(self) -> list[str]:
        """Say what the recording lacks."""
        count = self.counts
        found = [f"{number:,} {FAULTS[name]}" for name, number in self.faults.items()]
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

    def take(self) -> None:
        """Take the next message, after those that are missing before it."""
        frames = self.socket.recv_multipart()
        if len(frames) < 2:
            self._recording.counts["bad_batches"] += 1
            return
        number = int.from_bytes(frames[-2], "big")
        self.catch_up(number)
        self._recording.batch(self._server, number, frames[-1], is_replayed=False)

    def catch_up(self, end: int | None = None) -> None:
        """Ask for the missing batches before `end`, or for all; count those that are gone."""
        recording, server = self._recording, self._server
        begin = recording.next.get(server, 0)
        if begin == end or (server not in recording.next and self._replay_at is None):
            return
        answers = self._answers(max(begin - 1, 0))
        # a server that was started again may have sent more batches than it had before
        is_other = server in recording.sent and any(
            number == begin - 1 and _sent_s(payload) != recording.sent[server]
            for number, payload in answers[:1]
        )
        if is_other or (end is not None and end < begin):
            recording.counts["server_restarts"] += 1
            begin = 0
            answers = self._answers(0)
        for number, payload in answers:
            if number >= begin and (end is None or number < end):
                recording.counts["lost_batches"] += number - begin
                recording.counts["replayed_batches"] += 1
                recording.batch(server, number, payload, is_replayed=True)
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


def _sent_s(payload: bytes) -> float:
    import msgspec

    return float(msgspec.msgpack.decode(payload)[0])


def new_lines(path: Path, recording: Recording) -> Iterator[bytes]:
    """Yield the whole lines of a log after `recording.log_place`, and move it.

    A log that was rotated meanwhile is read to its end, and then its successors.
    """
    place = recording.log_place
    try:
        files = [x for x in path.parent.iterdir() if x.name.startswith(path.name) and x != path]
        files = [x for x in files if x.suffix != ".gz"]
        files = [*sorted(files, key=lambda x: x.stat().st_mtime_ns), path]
        inodes = [each.stat().st_ino for each in files]
        if place[0] not in (0, *inodes):
            recording.counts["lost_logs"] += 1
        first = inodes.index(place[0]) if place[0] in inodes else -1
        for each, inode in list(zip(files, inodes, strict=True))[first:]:
            with each.open("rb") as file:
                if place[0] != inode or os.fstat(file.fileno()).st_size < place[1]:
                    place[:] = [inode, 0]
                file.seek(place[1])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    place[1] += len(line)
                    yield line
    except OSError:  # it is not there yet, or is being rotated
        return


def record(options: argparse.Namespace) -> Recording:
    """Record until the time is over, or a signal ends the program."""
    recording = Recording(options.folder, options.rotate_mib << 20)
    replays = [*options.replay, *[None] * (len(options.events) - len(options.replay))]
    subscribers = [
        Subscriber(recording, *each) for each in zip(options.events, replays, strict=True)
    ]
    stopped: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: stopped.append(number))
    begin = time.monotonic()
    saved, faults = float("-inf"), recording.faults
    is_over = False
    while not is_over:
        is_over = bool(stopped) or time.monotonic() - begin >= options.seconds
        is_idle = True
        for subscriber in subscribers:
            if subscriber.socket.poll(20):
                is_idle = False
                subscriber.take()
            while is_over and subscriber.socket.poll(0):
                subscriber.take()
            if is_over:
                subscriber.catch_up()
        for line in new_lines(options.log, recording) if options.log else ():
            is_idle = False
            recording.logged(line)
        is_due = is_over or time.monotonic() - saved >= options.every
        if is_due:
            saved = time.monotonic()
            _scrape(recording, options.metrics)
        if is_due or recording.faults != faults:  # these are in no other file
            recording.save()
            faults = recording.faults
        if is_idle and not subscribers:
            time.sleep(0.1)
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
    except (OSError, ValueError, LookupError):
        recording.counts["missed_scrapes"] += 1


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
