"""Which slot of a slab holds which page: a table in SQLite, shared by all processes of a machine.

A slot is free, being written by one owner, or live. Only live slots have a key, and each key has
one slot. Every change is one transaction, so a process that dies leaves slots that are whole or
marked as being written; the table frees the latter once their owner is dead. `used_bytes` is the
size of all slots that are not free, and never exceeds the capacity once `reserve` returned.

A damaged table raises an error or points to the wrong slots; readers check the digest of each page.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hicache.storage.engines.owner import current_owner, is_alive
from hicache.storage.engines.private import open_file, refuse_link
from hicache.storage.engines.slot_files import Place, SlotFiles

_FREE, _WRITING, _LIVE = 0, 1, 2
_LOG_PAGES = 64  # 256 KiB
_KEYS_A_QUERY = 128  # upper bound, since SQLite prepares one statement for each number of keys

_SCHEMA = """
CREATE TABLE IF NOT EXISTS slots (
    slot_bytes INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    state INTEGER NOT NULL,
    tick INTEGER NOT NULL,
    owner TEXT,
    key BLOB,
    length INTEGER,
    digest BLOB,
    PRIMARY KEY (slot_bytes, slot)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON slots (key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_age ON slots (state, tick);
CREATE INDEX IF NOT EXISTS by_size ON slots (slot_bytes, state);
CREATE INDEX IF NOT EXISTS by_tick ON slots (tick);
CREATE TABLE IF NOT EXISTS totals (used_bytes INTEGER NOT NULL)
"""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot in a storage file that a process has reserved and is writing a page to.

    `tick` is a counter value that tells this reservation from later ones of the same slot.
    """

    place: Place
    tick: int


class StoredPage(NamedTuple):
    place: Place
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Written:
    key: bytes
    reservation: Reservation
    length: int
    digest: bytes


class SlotTable:
    """An SQLite table that records which slot of the storage files holds which page.

    All processes that share the files share the table. If there is no room, the least recently used
    page is evicted. The disk space of a freed slot is released in the same transaction, unless the
    slot is reused at once. An instance is not thread-safe: the caller holds a lock around each
    call, and a transaction around each change.
    """

    def __init__(
        self,
        path: Path,
        files: SlotFiles,
        *,
        capacity_bytes: int | None,
        busy_s: float,
        is_read_only: bool = False,
    ) -> None:
        self._files = files
        self._owner = current_owner()
        self._capacity_bytes = capacity_bytes
        if not is_read_only:
            for name in (path.name, *(f"{path.name}-{log}" for log in ("wal", "shm", "journal"))):
                refuse_link(path.with_name(name))  # SQLite would follow it
            os.close(open_file(path, os.O_RDWR | os.O_CREAT))
        self._db = sqlite3.connect(
            # nothing can write to a log on a read-only disk, so SQLite must not look for one
            f"{path.absolute().as_uri()}?{'immutable=1' if is_read_only else 'mode=rw'}",
            uri=True,
            timeout=busy_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=2 * _KEYS_A_QUERY,
        )
        if is_read_only:
            return
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            # a long log would keep the space that deleted pages leave on a full disk
            self._db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            # readers check the digest of each page, so an old table after a power cut is harmless
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self.transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._take_back()
                # counted anew at every opening, so an error in the sum does not last
                self._db.execute("DELETE FROM totals")
                self._db.execute(
                    "INSERT INTO totals SELECT coalesce(sum(slot_bytes), 0) FROM slots"
                    " WHERE state != ?",
                    (_FREE,),
                )
        except BaseException:
            self._db.close()
            raise

    def find(self, keys: Sequence[bytes]) -> dict[bytes, StoredPage]:
        found = {}
        for start in range(0, len(keys), _KEYS_A_QUERY):
            some = keys[start : start + _KEYS_A_QUERY]
            marks = ",".join("?" * len(some))
            for key, slot_bytes, slot, length, digest in self._db.execute(
                # without the hint, SQLite scans all live rows
                "SELECT key, slot_bytes, slot, length, digest FROM slots INDEXED BY by_key"
                f" WHERE key IN ({marks}) AND state = {_LIVE}",
                some,
            ):
                place = Place(int(slot_bytes), int(slot))
                found[key] = StoredPage(place, int(length), digest)
        return found

    def touch(self, keys: Iterable[bytes]) -> None:
        tick = self._next_tick()
        self._db.executemany(
            "UPDATE slots SET tick = ? WHERE key = ?",
            [(tick + i, key) for i, key in enumerate(keys)],
        )

    def reserve(self, wanted: Sequence[tuple[bytes, int]]) -> list[Reservation | StoredPage | None]:
        """Reserve a slot for each `(key, size in bytes)`, evicting the oldest pages if necessary.

        The result has one entry per wanted page, usually a `Reservation`. If the key is stored
        already, the entry is the stored page, and that page becomes the most recently used. The
        entry is None if no slot can be freed.
        """
        stored = self.find([key for key, _ in wanted])
        self.touch(stored)
        tick = self._next_tick()
        given: list[Reservation | StoredPage | None] = []
        for key, slot_bytes in wanted:
            page = stored.get(key)
            if page is not None:
                given.append(page)
                continue
            given.append(self._reserve(slot_bytes, tick))
            tick += 1
        return given

    def publish(self, pages: Sequence[Written], *, failed: Sequence[Reservation]) -> list[bool]:
        """Make written pages readable under their keys, and free the slots of failed writes.

        Return one flag per page: True if the key is stored now. If another process stored the same
        key first, that page stays, and the slot written by the caller is freed. False means that
        the slot was no longer reserved for the caller.
        """
        for reservation in failed:
            self._give_up(reservation)
        results = []
        for page in pages:
            place, tick = page.reservation.place, page.reservation.tick
            live = self._db.execute(
                "UPDATE OR IGNORE slots SET state = ?, owner = NULL, key = ?, length = ?,"
                " digest = ? WHERE slot_bytes = ? AND slot = ? AND state = ? AND tick = ?",
                (_LIVE, page.key, page.length, page.digest, place.slot_bytes, place.slot,
                 _WRITING, tick),
            ).rowcount  # fmt: skip
            if not live:
                self._give_up(page.reservation)
            results.append(bool(live) or bool(self.find([page.key])))
        return results

    def stored(self) -> tuple[int, int]:
        row = self._db.execute(
            "SELECT count(*), coalesce(sum(slot_bytes), 0) FROM slots WHERE state = ?", (_LIVE,)
        )
        num_pages, num_bytes = row.fetchone()
        return num_pages, num_bytes

    def close(self) -> None:
        self._db.close()

    def shrink_log(self) -> None:
        """Move the table's log, which takes some megabytes, into the table."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Return a context whose changes take effect together at its end, or not at all."""
        with self._db:  # commits, or rolls back after an error
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _take_back(self) -> bool:
        taken = False
        for slot_bytes, slot, owner in self._db.execute(
            "SELECT slot_bytes, slot, owner FROM slots WHERE state = ?", (_WRITING,)
        ).fetchall():
            if not is_alive(owner):
                self.free(Place(slot_bytes, slot))
                taken = True
        return taken

    def _next_tick(self) -> int:
        newest = self._db.execute("SELECT coalesce(max(tick), 0) FROM slots")
        return int(newest.fetchone()[0]) + 1

    def _reserve(self, slot_bytes: int, tick: int) -> Reservation | None:
        place = self._make_room(slot_bytes)
        if place is None:
            return None
        self._db.execute(
            "INSERT OR REPLACE INTO slots (slot_bytes, slot, state, tick, owner)"
            " VALUES (?, ?, ?, ?, ?)",
            (place.slot_bytes, place.slot, _WRITING, tick, self._owner),
        )
        self._charge(slot_bytes)
        return Reservation(place, tick)

    def _make_room(self, slot_bytes: int) -> Place | None:
        while self._capacity_bytes is not None:
            used = self._db.execute("SELECT used_bytes FROM totals").fetchone()[0]
            if used + slot_bytes <= self._capacity_bytes:
                break
            if slot_bytes > self._capacity_bytes:
                return None
            oldest = self._db.execute(
                "SELECT slot_bytes, slot FROM slots WHERE state = ? ORDER BY tick LIMIT 1", (_LIVE,)
            ).fetchone()
            if oldest is not None:
                place = Place(*oldest)
                if place.slot_bytes == slot_bytes and used <= self._capacity_bytes:
                    self._charge(-slot_bytes)
                    return place  # the caller overwrites it at once, so keep its space
                self.free(place)
            elif not self._take_back():
                return None
        free = self._db.execute(
            "SELECT min(slot) FROM slots WHERE slot_bytes = ? AND state = ?", (slot_bytes, _FREE)
        ).fetchone()[0]
        if free is None:
            free = self._db.execute(
                "SELECT coalesce(max(slot), -1) + 1 FROM slots WHERE slot_bytes = ?", (slot_bytes,)
            ).fetchone()[0]
        return Place(slot_bytes, free)

    def _give_up(self, reservation: Reservation) -> None:
        place = reservation.place
        ours = self._db.execute(
            "SELECT 1 FROM slots WHERE slot_bytes = ? AND slot = ? AND state = ? AND tick = ?",
            (place.slot_bytes, place.slot, _WRITING, reservation.tick),
        ).fetchone()
        if ours is not None:
            self.free(place)

    def free(self, place: Place) -> None:
        freed = self._db.execute(
            "UPDATE slots SET state = ?, owner = NULL, key = NULL, length = NULL, digest = NULL"
            " WHERE slot_bytes = ? AND slot = ?",
            (_FREE, place.slot_bytes, place.slot),
        ).rowcount
        if not freed:
            raise sqlite3.DatabaseError(f"the slot table is damaged: {place} cannot be updated")
        self._charge(-place.slot_bytes)
        self._files.free_space(place)

    def _charge(self, num_bytes: int) -> None:
        self._db.execute("UPDATE totals SET used_bytes = used_bytes + ?", (num_bytes,))
