"""SGLang's kernels in a folder of their own; the package here has their places and nothing else."""

import subprocess
import sys

import pytest

from experiments.gpu.sglang_kernels import TAKEN, take

IMPORTED = """
from sglang.kernels.jit.utils import arch
from sglang.kernels.ops.kvcache import hicache

assert arch.is_cuda() and hicache.arch is arch
"""


@pytest.fixture
def package(tmp_path):
    package = tmp_path / "release" / "sglang"
    for name in TAKEN:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("") if path.suffix else path.mkdir()
    (package / "kernels/jit/utils/arch.py").write_text(
        "from sglang.srt.utils.common import is_cuda\n"
    )
    hicache = package / "kernels/ops/kvcache/hicache.py"
    hicache.write_text("from sglang.kernels.jit.utils import arch\n")
    for parent in hicache.relative_to(package).parents:  # as theirs do
        (package / parent / "__init__.py").write_text("raise SystemExit('all of SGLang')\n")
    return package


def test_the_kernels_are_imported_without_the_rest(package, tmp_path):
    take(package, tmp_path / "made" / "sglang")
    folder = tmp_path / "made"
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, cwd=folder)


def test_a_release_that_keeps_them_elsewhere_is_told(package, tmp_path):
    (package / "srt/environ.py").unlink()
    with pytest.raises(FileNotFoundError, match="environ"):
        take(package, tmp_path / "made" / "sglang")
