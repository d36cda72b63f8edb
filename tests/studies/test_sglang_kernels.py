"""SGLang's copy kernels, taken out of a release without the rest of SGLang."""

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


def test_the_kernels_are_imported_without_the_rest_of_sglang(tmp_path):
    package, made = tmp_path / "release" / "sglang", tmp_path / "made"
    for name in TAKEN:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("") if path.suffix else path.mkdir()
    arch = package / "kernels/jit/utils/arch.py"
    arch.write_text("from sglang.srt.utils.common import is_cuda\n")
    hicache = package / "kernels/ops/kvcache/hicache.py"
    hicache.write_text("from sglang.kernels.jit.utils import arch\n")
    for parent in hicache.relative_to(package).parents:  # as theirs do
        (package / parent / "__init__.py").write_text("raise SystemExit('all of SGLang')\n")
    take(package, made / "sglang")
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, cwd=made)
    (package / "srt/environ.py").unlink()
    with pytest.raises(FileNotFoundError, match="environ"):
        take(package, tmp_path / "again" / "sglang")


@pytest.mark.parametrize(("name", "programs", "page"), [("registers", 2, 1), ("tma", 4, 16)])
def test_the_kernels_are_called_as_sglang_calls_them(name, programs, page, monkeypatch):
    sizes, calls = [], []
    module = SimpleNamespace(
        use_hicache_tma_kernel=lambda **given: sizes.append(given) or True,
        transfer_hicache_all_layer=lambda **given: calls.append(given),
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
    pointers = {
        f"{what}_ptr_{side}": [pool[place].data_ptr(), pool[place + 2].data_ptr()]
        for side, pool in (("src", src), ("dst", dst))
        for place, what in enumerate("kv")
    }
    strides = ("kv_cache_src_stride_bytes", "kv_cache_dst_stride_bytes", "element_size")
    assert first == pointers | dict.fromkeys(strides, 256) | {
        "indices_src": rows,
        "indices_dst": [row + 48 for row in rows],
        "block_quota": programs,
        "page_size": page,
    }
    assert calls[1]["block_quota"] == 7
    wanted = [{"element_size": 256, "block_quota": 4, "page_size": 16}]
    assert sizes == (wanted if name == "tma" else [])
    with pytest.raises(NotImplementedError, match="layer-first pools of equal pages"):
        kernel(list(src), list(dst[:, :, :, :1]))
    if name == "tma":
        module.use_hicache_tma_kernel = lambda **given: False
        with pytest.raises(NotImplementedError, match="declines these pages"):
            kernel(list(src), list(dst))


def test_kernels_that_cannot_be_imported_raise_not_implemented():
    pool = torch.zeros(2, 64)
    with pytest.raises(NotImplementedError, match="SGLang cannot be imported"):
        sglang_peers.tma([pool, pool], [pool.clone(), pool.clone()])
