"""A password comes from the environment, and is refused anywhere else."""

import pytest

from hicache.storage.passwords import refuse_password


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:s3cret%40w@host", "rediss://me:***@host"),
        ("redis://:s3cret@w@host", "redis://:***@host"),
        ("redis://:s3cret/w,x y@host", "redis://:***@host"),
        ("redis://h1:6379,redis://:s3cret@h2", "redis://h1:6379,redis://:***@h2"),
    ],
)
def test_a_password_in_a_root_is_refused_and_not_told(root: str, shown: str) -> None:
    with pytest.raises(ValueError, match="holds a password") as refused:
        refuse_password(root)
    assert f"storage.root={shown} " in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "redis://me@host", "/a/place", "host:50051"]
)
def test_what_has_no_password_stays(url: str) -> None:
    refuse_password(url)
