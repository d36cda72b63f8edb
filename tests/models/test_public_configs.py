"""Bytes per token of the config.json files of two public repositories, with the arithmetic shown.

`public_configs.csv` has, for each file of ai-dynamo/aiconfigurator (095f58a5) and of
inference-sim/inference-sim (f90a1e3a): its hash, the bytes that a token of full attention and its
index keys take, the bytes of a token inside a sliding window, and the arithmetic that gives them
from the numbers of the file; or the field for which the file is refused. Compressed KV counts
per token: an entry of 4 tokens is a quarter each.

With HICACHE_CONFIGS=FOLDER, where FOLDER/OWNER/NAME holds a checkout of each repository, the
files themselves are read.
"""

import csv
import hashlib
import os
import re
from pathlib import Path

import pytest

from hicache.models import LayerKind
from hicache.models.hugging_face import read_model

with Path(__file__).with_name("public_configs.csv").open() as file:
    TABLE = list(csv.DictReader(file))
READ = [row for row in TABLE if row["outcome"] == "read"]
FOLDER = os.environ.get("HICACHE_CONFIGS")


def value_of(arithmetic: str) -> float:
    """Evaluate sums and products of the numbers of a file."""
    assert re.fullmatch(r"[\d +*/()]*", arithmetic), arithmetic
    return float(eval(arithmetic)) if arithmetic else 0.0


def test_at_least_60_files_are_read_and_the_others_name_a_field():
    assert len(READ) >= 60
    refused = [row for row in TABLE if row["outcome"] == "refused"]
    assert len(READ) + len(refused) == len(TABLE) >= 99
    assert {row["field"].partition(".")[0] for row in refused} == {
        "model_type",
        "quantization_config",
    }


@pytest.mark.parametrize("row", READ, ids=lambda row: Path(row["path"]).name)
def test_the_bytes_in_the_table_are_those_of_its_arithmetic(row):
    assert value_of(row["arithmetic"]) == float(row["token_bytes"])
    assert value_of(row["window_arithmetic"]) == float(row["window_bytes"] or 0)


@pytest.mark.skipif(FOLDER is None, reason="HICACHE_CONFIGS names no folder with the repositories")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['repository']}/{row['path']}")
def test_a_file_gives_the_bytes_of_the_table_or_the_refusal(row):
    path = Path(str(FOLDER)) / row["repository"] / row["path"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == row["sha256"]
    if row["outcome"] == "refused":
        with pytest.raises(ValueError, match=re.escape(row["field"])):
            read_model(path, {})
        return
    model = read_model(path, {})
    parts = [each for each in model.parts if each.name != "compressor"]
    found = model.page_bytes(LayerKind.full, 1)
    found += sum(model.part_layers(each) * each.entry_bytes / each.tokens for each in parts)
    assert found == float(row["token_bytes"])
    window = model.page_bytes(LayerKind.swa, 1) if LayerKind.swa in model.kinds else 0
    assert window == float(row["window_bytes"] or 0)
