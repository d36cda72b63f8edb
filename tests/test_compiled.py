"""What may be compiled, and what is said of it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from hicache import compiled


def test_all_that_may_be_compiled_is_there():
    assert [name for name in compiled.MODULES if not (compiled.FOLDER / name).is_file()] == []


def test_what_was_edited_since_it_was_compiled_is_not_run(tmp_path, monkeypatch):
    stamp = tmp_path / "compiled.sha256"
    monkeypatch.setattr(compiled, "STAMP", stamp)
    assert not compiled.is_compiled()
    stamp.write_text(compiled.digest())
    assert compiled.is_compiled()
    stamp.write_text("of another day")
    with pytest.raises(RuntimeError, match="run `make fast` again, or `make plain`"):
        compiled.is_compiled()


def test_it_runs_compiled_just_where_it_says_so():
    names = ["hicache." + name.removesuffix(".py").replace("/", ".") for name in compiled.MODULES]
    origins = [Path(spec.origin or "") for name in names if (spec := find_spec(name)) is not None]
    assert len(origins) == len(names)
    assert {origin.suffix == ".so" for origin in origins} == {compiled.is_compiled()}
