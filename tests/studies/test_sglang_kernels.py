"""SGLang's kernels in a folder of their own; the package here has their places and nothing else."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from experiments.gpu import sglang_peers
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


@pytest.mark.parametrize(
    ("name", "programs", "uses_tma"), [("registers", 2, False), ("tma", 4, True)]
)
def test_sglangs_own_kernels_are_called_as_sglang_calls_them(name, programs, uses_tma, monkeypatch):
    asked, calls = [], []
    module = SimpleNamespace(
        use_hicache_tma_kernel=lambda **sizes: asked.append(sizes) or True,
        transfer_hicache_all_layer=lambda **arguments: calls.append(arguments),
    )
    monkeypatch.setitem(sys.modules, sglang_peers.SGLANG_MODULE, module)
    src, dst = torch.zeros(4, 6, 16, 2, 32), torch.zeros(4, 9, 16, 2, 32)  # K, V, K, V
    kernel = getattr(sglang_peers, name)
    launch = kernel(list(src), list(dst))
    ids = torch.tensor([5, 0], dtype=torch.int32)
    launch(ids, ids + 3)
    launch(ids, ids, num_programs=7)
    first = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in calls[0].items()}
    rows = [*range(80, 96), *range(16)]
    assert first == {
        "k_ptr_src": [src[0].data_ptr(), src[2].data_ptr()],
        "v_ptr_src": [src[1].data_ptr(), src[3].data_ptr()],
        "k_ptr_dst": [dst[0].data_ptr(), dst[2].data_ptr()],
        "v_ptr_dst": [dst[1].data_ptr(), dst[3].data_ptr()],
        "indices_src": rows,
        "indices_dst": [row + 48 for row in rows],
        "kv_cache_src_stride_bytes": 256,
        "kv_cache_dst_stride_bytes": 256,
        "element_size": 256,
        "block_quota": programs,
        "page_size": 16 if uses_tma else 1,
    }
    assert calls[1]["block_quota"] == 7
    assert asked == [{"element_size": 256, "block_quota": 4, "page_size": 16}] * uses_tma
    with pytest.raises(NotImplementedError, match="layer-first pools of equal pages"):
        kernel(list(src), list(dst[:, :, :, :1]))
    module.use_hicache_tma_kernel = lambda **sizes: False
    if uses_tma:
        with pytest.raises(NotImplementedError, match="declines these pages"):
            kernel(list(src), list(dst))


def test_kernels_that_cannot_be_imported_decline():
    pool = torch.zeros(2, 64)
    with pytest.raises(NotImplementedError, match="SGLang cannot be imported"):
        sglang_peers.tma([pool, pool], [pool.clone(), pool.clone()])
