"""Fuzzes all readers of traces with atheris, starting from the fixtures.

python -m tests.fuzz.fuzz_readers SECONDS        (pip install atheris; Python 3.11)
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hicache.workload"]):
    from tests.fuzz.readers import SEEDS, read


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(SEEDS):
            (corpus / str(number)).write_bytes(seed.read_bytes())
        path = Path(folder) / "trace"

        def one(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        options = [f"-max_total_time={sys.argv[1]}", "-rss_limit_mb=2000", "-timeout=60"]
        atheris.Setup([sys.argv[0], *options, "-max_len=20000", str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
