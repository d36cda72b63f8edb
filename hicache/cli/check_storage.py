"""Check a storage engine of your own: the rules that every built-in engine keeps.

hicache check-storage my_storage:Mine
hicache check-storage my_storage:Mine --root redis://localhost:6379

Each rule opens the engine in a new namespace, as Mine(root, namespace=..., capacity_bytes=...,
page_bytes=None), and deletes its pages at the end. Without --root, root is an empty directory that
is removed at the end. The exit code is 1 if a rule is broken.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from tempfile import TemporaryDirectory
from uuid import uuid4

from hicache.cli.command import in_one_sentence, parser_of
from hicache.config import StorageConfig
from hicache.runs.errors import report_error
from hicache.storage.base import Storage
from hicache.storage.contract import NUM_KEYS, RULES, ContractError, Open, key
from hicache.storage.factory import open_storage
from hicache.user_code import user_code

ALL_KEYS = [key(number, kind) for number in range(NUM_KEYS) for kind in (0, 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache check-storage", __doc__)
    parser.add_argument("storage", metavar="module:Class", help="class to check")
    parser.add_argument("--root", help="its first argument: a directory, an address, …")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="hicache-") as folder:
        kind, root = options.storage, options.root or folder
        with in_one_sentence(), closing(_open(kind, root, "open")):
            print(f"checking {kind} at {root}")
        is_right = [follows(rule, kind, root) for rule in RULES]
    if not all(is_right):
        sys.exit(1)


def follows(rule: Callable[[Open], None], kind: str, root: str) -> bool:
    """Print whether the storage engine `kind` follows a rule, and return it."""
    namespace = uuid4().hex
    try:
        with user_code(f"storage.kind={kind}", ContractError), ExitStack() as stack:

            def open_store(*, suffix: str = "", capacity_bytes: int | None = None) -> Storage:
                storage = _open(kind, root, namespace + suffix, capacity_bytes)
                stack.enter_context(closing(storage))
                stack.callback(_clear, storage)
                return storage

            rule(open_store)
    except Exception as error:
        print(f"  FAILED: {rule.__doc__}", flush=True)
        report_error(error)
        return False
    print(f"  {rule.__doc__}", flush=True)
    return True


def _clear(storage: Storage) -> None:
    with suppress(Exception):  # a rule of its own checks deletion
        storage.delete(ALL_KEYS)


def _open(kind: str, root: str, namespace: str, capacity_bytes: int | None = None) -> Storage:
    capacity_gib = None if capacity_bytes is None else capacity_bytes / 2**30
    config = StorageConfig(kind=kind, root=root, capacity_gib=capacity_gib)
    storage = open_storage(config, namespace=namespace, page_bytes=None)
    if storage is None:
        raise ValueError("there is no engine to check: storage.kind is none")
    return storage
