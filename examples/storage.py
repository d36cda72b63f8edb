"""A storage engine of one file per page, in 45 lines. At the root of the repository:

hicache check-storage examples.storage:Folder
hicache run storage.kind=examples.storage:Folder storage.root=outputs/folder workload.limit=100
"""

from pathlib import Path
from uuid import uuid4

from hicache.storage.base import StorageStats


class Folder:
    def __init__(self, root, *, namespace, capacity_bytes, page_bytes):
        self.folder = Path(root, namespace)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes

    def contains(self, keys):
        return [self._path(key).exists() for key in keys]

    def read(self, keys, buffers):
        return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def write(self, keys, buffers):
        return [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys):
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def stats(self):
        sizes = [path.stat().st_size for path in self.folder.glob("*.page")]
        return StorageStats(stored_pages=len(sizes), stored_bytes=sum(sizes))

    def close(self):
        pass

    def _path(self, key):
        return self.folder / f"{key.hex()}.page"

    def _read(self, key, buffer):
        try:
            page = self._path(key).read_bytes()
        except FileNotFoundError:
            return False
        if len(page) != len(buffer):
            return False
        buffer[:] = page
        return True

    def _write(self, key, buffer):
        path = self._path(key)
        if path.exists():
            return True
        full = self.capacity_bytes
        if full is not None and self.stats().stored_bytes + len(buffer) > full:
            return False
        draft = self.folder / uuid4().hex
        draft.write_bytes(buffer)
        draft.replace(path)  # other readers see the whole page or none
        return True


if __name__ == "__main__":
    from hicache.cli.check_storage import main

    main(["examples.storage:Folder"])
