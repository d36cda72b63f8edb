import pytest

from hicache.results import requests_file
from hicache.results.metrics import Status
from hicache.results.requests_file import FILES, has_requests, read_requests, write_requests


@pytest.fixture(params=FILES)
def expected_file(request, monkeypatch):
    """The name of the file in each of its two formats; without pyarrow, the second is written."""
    if request.param == FILES[1]:
        monkeypatch.setattr(requests_file, "find_spec", lambda name: None)
    return request.param


def test_requests_are_read_as_they_were_written(tmp_path, make_record, expected_file):
    rejected = make_record(1, status=Status.rejected, reason="too long", finish_ns=None)
    assert write_requests(tmp_path, [make_record(0), rejected]) == tmp_path / expected_file
    first, second = read_requests(tmp_path).to_dict("records")
    assert (first["status"], first["device_hit_len"], first["queue_ns"]) == ("finished", 400, 100)
    assert (second["status"], second["reason"]) == ("rejected", "too long")
    assert second["finish_ns"] != second["finish_ns"]  # NaN


def test_a_run_without_requests_has_an_empty_file(tmp_path, expected_file):
    write_requests(tmp_path, [])
    assert len(read_requests(tmp_path)) == 0


def test_equal_records_give_files_of_equal_bytes(tmp_path, make_record, expected_file):
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(write_requests(tmp_path / name, [make_record(0), make_record(1)]))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_directory_without_a_file_of_requests_is_refused(tmp_path):
    assert not has_requests(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds neither"):
        read_requests(tmp_path)


@pytest.mark.parametrize("spoil", ["drop", "drop behind an empty one", "texts"])
def test_a_file_without_a_column_of_numbers_is_refused(tmp_path, make_record, spoil):
    write_requests(tmp_path, [make_record(0)])
    table = read_requests(tmp_path)
    if spoil == "drop behind an empty one":
        table["session_id"] = None
    if spoil.startswith("drop"):
        del table["prompt_len"]
    else:
        table["prompt_len"] = "many"
    table.to_parquet(tmp_path / FILES[0])
    with pytest.raises(ValueError, match="lacks a column of numbers prompt_len"):
        read_requests(tmp_path)
    (tmp_path / FILES[0]).write_bytes(b"no table")
    with pytest.raises(ValueError, match="is damaged"):
        read_requests(tmp_path)


def test_the_columns_of_a_file_have_one_type_even_without_values(tmp_path, make_record):
    none = make_record(0, status=Status.rejected, first_token_ns=None, finish_ns=None, reason="x")
    write_requests(tmp_path, [none])
    held = read_requests(tmp_path)
    assert held["finish_ns"].isna().all()
    assert (held["prompt_len"].dtype.kind, held["reason"].tolist()) == ("i", ["x"])


def test_a_file_of_an_earlier_version_has_no_hits_from_peers(tmp_path, make_record):
    write_requests(tmp_path, [make_record(0)])
    read_requests(tmp_path).drop(columns="peer_hit_len").to_parquet(tmp_path / FILES[0])
    assert read_requests(tmp_path)["peer_hit_len"].tolist() == [0]
