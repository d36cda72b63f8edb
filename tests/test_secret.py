"""Secrets are refused in what a run stores, and masked in what it prints."""

import pytest

from hicache import env
from hicache.env import describe_environment
from hicache.secret import PASSWORD, masked, refuse_secret

URLS = [
    "redis://:s3cret@host:6379/0",
    "rediss://me:s3cret%40w@host",
    "redis://s3cret@host",
    "redis://:s3cret@w@host",
    "redis://:s3cret/w,x y@host",
    "redis://h1:6379,redis://:s3cret@h2",
    "redis://host/0?password=s3cret",
    "unix:///run/redis.sock?password=s3cret",
    "https://host/?token=s3cret",
    "https://host/#s3cret",
]
OTHERS = ["redis://host/s3cret", "me:s3cret@host:50051", "host:1?password=s3cret", "s://a/b/s3cret"]


@pytest.mark.parametrize("root", URLS + OTHERS)
def test_a_secret_in_a_setting_is_refused_and_masked(root, monkeypatch):
    with pytest.raises(ValueError, match="may hold a password or another secret") as refused:
        refuse_secret("storage.root", root)
    assert "s3cret" not in str(refused.value)
    if root in OTHERS:
        return
    with pytest.raises(ValueError, match=r"workload\.path=") as refused:
        refuse_secret("workload.path", root)
    assert "s3cret" not in str(refused.value)
    told = masked(f"cannot reach {root}: connection refused")
    assert "s3cret" not in told
    assert told.startswith("cannot reach ")
    assert masked(told) == told
    monkeypatch.setenv("WANDB_BASE_URL", root)
    monkeypatch.setenv("HICACHE_DATA", "/a/place")
    found = describe_environment()  # for a bug report
    assert "s3cret" not in str(found)
    assert found["HICACHE_DATA"] == "/a/place"


@pytest.mark.parametrize(
    "root",
    ["redis://host:6379/0", "rediss://[::1]:6379", "unix:///run/redis.sock?db=3", "/a/place@b",
     "host:50051", "redis://h1:6379,redis://h2:6379", "s3://bucket/pages", "relative/path",
     "redis://${oc.env:HOST}:${oc.env:PORT}/0", "etcd://host:2379", '"redis://host"'],
)  # fmt: skip
def test_an_address_without_a_secret_is_accepted(root):
    refuse_secret("storage.root", root)


def test_a_variable_of_a_job_that_holds_a_secret_is_refused():
    refuse_secret("hydra.job.env_set.HICACHE_DATA", "there")
    with pytest.raises(ValueError, match=f"env_set.{PASSWORD}=") as refused:
        refuse_secret(f"hydra.job.env_set.{PASSWORD}", "s3cret")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (PASSWORD, "s3cret"),
        ("WANDB_API_KEY", "s3cret"),
        ("MY_DATABASE", "postgres://me:s3cret@host/db"),
        ("MY_DATABASE", "postgres://me:%733cret@host/db"),
        ("HOOK", "https://host/hook?key=s3cret"),
    ],
)
def test_a_secret_of_the_environment_is_masked(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert masked("the password s3cret is wrong") == "the password *** is wrong"


def test_ordinary_values_of_the_environment_are_not_masked(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("FOUR_TOKEN", "abcd")
    assert masked("abcd abc") == "*** abc"
    monkeypatch.setenv("SHORT_TOKEN", "on")
    monkeypatch.setenv("SERVER", "https://host:80/path")
    assert masked("false, on, host, 80, path") == "false, on, host, 80, path"


def test_the_command_prints_each_fact_of_the_environment_on_a_line(capsys):
    env.main()
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in lines] == list(describe_environment())
