"""Compile the modules in which a replay spends its time (`make fast`), or undo it (`make plain`).

This needs a C compiler and mypyc (`pip install -e '.[dev]'`), and takes about two minutes.
"""

import sys
from os import chdir
from tempfile import TemporaryDirectory

from mypyc.build import mypycify
from setuptools import Distribution

from hicache.compiled import FOLDER, MODULES, STAMP, digest


def main() -> None:
    """Compile them in place; with `--undo` leave none compiled."""
    undo()
    if sys.argv[1:] == ["--undo"]:
        return
    chdir(FOLDER.parent)
    with TemporaryDirectory() as scratch:
        paths = [f"hicache/{name}" for name in MODULES]
        extensions = mypycify(
            paths, opt_level="2", debug_level="0", target_dir=scratch, group_name="hicache"
        )
        distribution = Distribution({"name": "hicache", "ext_modules": extensions})
        build = distribution.get_command_obj("build_ext")
        build.inplace, build.build_temp = True, scratch
        distribution.run_command("build_ext")
    STAMP.write_text(digest())


def undo() -> None:
    """Remove what was compiled."""
    STAMP.unlink(missing_ok=True)
    for made in [*FOLDER.rglob("*.so"), *FOLDER.parent.glob("hicache__mypyc.*.so")]:
        made.unlink()


if __name__ == "__main__":
    main()
