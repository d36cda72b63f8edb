"""Summaries of whole runs, kept as data: which keys of which runs a change of the code changes.

`configurations.yaml` holds the runs, `summaries.csv` a row for each key of their summaries and a
column for each run. Floats have nine significant digits, so that the last bits of another machine's
arithmetic do not count.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pandas as pd
import yaml

from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.runs import provenance
from hicache.runs.schema import config_of

HERE = Path(__file__).parent
SUMMARIES = HERE / "summaries.csv"
CONFIGURATIONS: dict[str, str] = yaml.safe_load((HERE / "configurations.yaml").read_text())

Summary = dict[str, str]  # what stands in the file, by key


def summary_of(name: str) -> Summary:
    """Run the configuration of this name and return its summary. Needs the real traces."""
    result = run(config_of(*CONFIGURATIONS[name].split()))
    summary = summarize(result.records, result.measures)
    return {
        key: str(value) if isinstance(value, int) else f"{value:.9g}"
        for key, value in sorted(summary.items())
    }


def changes(golden: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return a line for each key whose value differs, or that only one of the two has."""
    return [
        f"{key}: {golden.get(key, 'absent')} -> {found.get(key, 'absent')}"
        for key in sorted({*golden, *found})
        if golden.get(key) != found.get(key)
    ]


def read(path: Path = SUMMARIES) -> dict[str, Summary]:
    """Return the golden summaries by the name of their configuration."""
    table = pd.read_csv(path, index_col="key", dtype=str)
    return {str(name): column.dropna().to_dict() for name, column in table.items()}


def write(summaries: Mapping[str, Summary], path: Path = SUMMARIES) -> None:
    """Write the golden summaries."""
    pd.DataFrame(summaries).sort_index().to_csv(path, index_label="key", lineterminator="\n")


def digest() -> str:
    """Return the name of the decision rules under which the golden summaries were made."""
    return sha256(SUMMARIES.read_bytes()).hexdigest()[:8]


def name_rules() -> None:
    """Write `digest()` into the source file from which runs read the name of their rules."""
    source = Path(provenance.__file__)
    source.write_text(re.sub(r'RULES = "\w+"', f'RULES = "{digest()}"', source.read_text()))
