"""Copy SGLang's own copy kernels and their imports to a folder small enough to carry to a GPU.

    python -m experiments.gpu.sglang_kernels DIR [--release 0.5.23]
    SGLANG=DIR experiments/gpu/gpu.sh contest

The original `__init__.py` files import all of SGLang, so those in the folder are empty. One helper
that the kernels call is replaced. The kernels are built on first use, by nvcc and ninja, through
apache-tvm-ffi.
"""

import argparse
import shutil
import sys
from pathlib import Path

from experiments.diff.engines import ENGINES, files_of
from experiments.diff.protocol import SideError

TAKEN = (
    "kernels/jit/utils",
    "kernels/jit/include",
    "kernels/jit/csrc/kvcacheio",
    "kernels/kernel_api_logging.py",
    "kernels/ops/kvcache/hicache.py",
    "srt/environ.py",
)
COMMON = '"""Instead of SGLang\'s helpers."""\n\n\ndef is_cuda() -> bool:\n    return True\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", default="0.5.23", help="or a checkout, or a wheel")
    options = parser.parse_args()
    try:
        files, name = files_of(ENGINES["sglang"], options.release)
        take(files / "sglang", options.folder / "sglang")
    except (SideError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{name}: {size / 1e6:.1f} MB in {options.folder}")
    return 0


def take(package: Path, folder: Path) -> None:
    """Copy the KV copy kernels of SGLang from its package to a folder.

    Raises:
        FileNotFoundError: this release of SGLang has the kernels in other files.
    """
    for name in TAKEN:
        source, target = package / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, target)
    common = folder / "srt" / "utils" / "common.py"
    common.parent.mkdir(exist_ok=True)
    common.write_text(COMMON)
    for path in folder.rglob("*.py"):
        for parent in path.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()


if __name__ == "__main__":
    sys.exit(main())
