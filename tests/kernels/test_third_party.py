"""The study of other packages' kernels: imports without their engine, and rows of its table."""

import dataclasses
import sys

from experiments.studies import third_party_kernels as study
from hicache.workbench import codegen

FILES = {
    "__init__.py": "raise ImportError('the whole engine')",
    "kernels/__init__.py": "raise ImportError('all kernels')",
    "kernels/ops/twice.py": """
from sglang.kernels.registry import register
from sglang.srt.utils import is_hip, limit
HIP = is_hip()
@register
def twice(x):
    return x + x
""",
}


def test_a_module_of_kernels_is_imported_without_its_engine(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = study.import_module("sglang.kernels.ops.twice")
    assert (module.twice(4), module.HIP, bool(module.limit.of.any)) == (8, False, False)
    for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def test_configurations_of_a_kernel_share_a_row_of_the_table():
    fields = {field.name: 0 for field in dataclasses.fields(codegen.Report)}
    fields |= {"name": "x", "registers": 40, "payload_loads": {128: 8}, "stores": {16: 2}}
    one = codegen.Report(**fields | {"programs_of_sm": 2, "flight_bytes": 32 << 10})
    other = dataclasses.replace(one, registers=255, spill_accesses=7, payload_loads={64: 1})
    assert study.row("x", [one, other]) == ("| x | 2 | 1 | 40 to 255 | 64, 128 bit | 16 bit | 64 |")
    assert study.row("x", [dataclasses.replace(one, flight_bytes=0)]).endswith("| no steady loop |")
