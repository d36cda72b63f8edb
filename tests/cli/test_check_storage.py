"""`hicache check-storage`: for each of its rules, a storage engine that breaks it is reported."""

from collections import OrderedDict

import pytest

from hicache.cli import check_storage
from hicache.storage import contract
from hicache.storage.engines.memory import MemoryStorage

SHARED = OrderedDict()


class Mine(MemoryStorage):
    """A correct storage engine with the constructor that a user's class must have."""

    def __init__(self, root, *, namespace, capacity_bytes, page_bytes):
        super().__init__(capacity_bytes=capacity_bytes, page_bytes=page_bytes)


class Shortens(Mine):
    def write(self, keys, buffers):
        return super().write(keys, [buffer[:4096] for buffer in buffers])


class KeepsBuffers(Mine):
    """A faulty engine: it stores a view of the caller's buffer instead of a copy."""

    def write(self, keys, buffers):
        self._pages.update(zip(keys, buffers, strict=True))
        return [True] * len(keys)


class AnswersOnce(Mine):
    def read(self, keys, buffers):
        return [all(super().read(keys, buffers))] * len(keys)


class FailsOnMissing(Mine):
    def read(self, keys, buffers):
        if not all(self.contains(keys)):
            raise KeyError("no such page")
        return super().read(keys, buffers)


class AnswersShortBatches(Mine):
    def contains(self, keys):
        return super().contains(keys[:256])


class IgnoresKinds(Mine):
    def contains(self, keys):
        return super().contains([key[:-1] + b"\0" for key in keys])


class FillsLongerBuffers(Mine):
    def read(self, keys, buffers):
        full = contract.PAGE_BYTES
        if any(len(buffer) > full for buffer in buffers):
            return super().read(keys, [buffer[:full] for buffer in buffers])
        return super().read(keys, buffers)


class Overwrites(Mine):
    def write(self, keys, buffers):
        self.delete(keys)
        return super().write(keys, buffers)


class NeverDeletes(Mine):
    def delete(self, keys):
        pass


class OneNamespace(Mine):
    """A faulty engine: all its instances share their pages, whatever their namespaces are."""

    def __init__(self, root, **more):
        super().__init__(root, **more)
        self._pages = SHARED


class Grows(Mine):
    def __init__(self, root, **more):
        super().__init__(root, **{**more, "capacity_bytes": None})


class NoStats(Mine):
    def stats(self):
        return {"pages": 1}


class WrongInBatchesOfFour(Mine):
    """A faulty engine: it reads a wrong byte in batches of four, as the check's threads read."""

    def read(self, keys, buffers):
        answer = super().read(keys, buffers)
        if len(keys) == 4 and any(answer):
            buffers[answer.index(True)][-1] ^= 1
        return answer


def check(capsys, *arguments):
    try:
        check_storage.main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr()


def failures(printed):
    return [line.strip() for line in printed.out.splitlines() if "FAILED" in line]


def test_a_correct_engine_passes_every_rule(capsys):
    code, printed = check(capsys, f"{__name__}:Mine")
    assert (code, failures(printed), printed.err) == (0, [], "")
    assert printed.out.count("\n  ") == len(contract.RULES)


@pytest.mark.parametrize(
    ("engine", "rule", "said"),
    [
        (Shortens, contract.pages_are_read_as_written, "hits of a read of 300001 bytes"),
        (KeepsBuffers, contract.buffers_may_change_after_a_write, "wrong bytes for key"),
        (AnswersOnce, contract.each_key_has_its_answer, "expected [False, False, True, True]"),
        (FailsOnMissing, contract.each_key_has_its_answer, "raised KeyError: 'no such page'"),
        (AnswersShortBatches, contract.long_batches_are_answered, "contains of 300 keys"),
        (IgnoresKinds, contract.kinds_are_separate, "expected [False, True], got [True, True]"),
        (FillsLongerBuffers, contract.other_lengths_are_misses, "into 8193: expected False"),
        (Overwrites, contract.a_second_write_changes_nothing, "wrong bytes for key"),
        (NeverDeletes, contract.deleted_pages_are_missing, "contains: expected [False, True]"),
        (OneNamespace, contract.namespaces_are_separate, "expected [False], got [True]"),
        (WrongInBatchesOfFour, contract.threads_read_no_wrong_byte, "wrong bytes for key"),
        (Grows, contract.a_full_store_is_no_error, "bytes are stored, 81920 were allowed"),
        (NoStats, contract.a_full_store_is_no_error, "stats returned {'pages': 1}"),
    ],
)
def test_an_engine_that_breaks_a_rule_is_reported(engine, rule, said, capsys):
    code, printed = check(capsys, f"{__name__}:{engine.__name__}")
    assert code == 1
    assert f"FAILED: {rule.__doc__}" in failures(printed)
    assert said in printed.err


@pytest.mark.parametrize(
    ("name", "said"),
    [("none", "there is no engine to check"), ("no_such_module:Mine", "No module named")],
)
def test_a_name_without_a_storage_engine_is_refused_in_one_sentence(name, said, capsys):
    code, printed = check(capsys, name)
    assert code == 2 or said in str(code)
    assert printed.out == ""
