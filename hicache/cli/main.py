"""The `hicache` command: one subcommand per program."""

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

from hicache import __version__

COMMANDS = {
    "run": ("hicache.cli.run", "run one experiment, or a sweep of them"),
    "advise": ("hicache.cli.advise", "find the changes of a server that are worth most"),
    "record": ("hicache.cli.record", "record a running server as a trace without text"),
    "anonymize": ("hicache.cli.anonymize", "copy a trace without text, with hashed blocks"),
    "compare": ("hicache.cli.compare", "compare stored runs or sweeps"),
    "report": ("hicache.cli.report", "make the pages of stored runs"),
    "size": ("hicache.cli.size", "find how much host memory a workload can use"),
    "curve": ("hicache.cli.curve", "count the hits at every size of the cache in one pass"),
    "validate": ("hicache.cli.validate", "compare a run with the log of a server"),
    "calibrate": ("hicache.cli.calibrate", "find a server's constant from its log"),
    "explain": ("hicache.cli.explain.command", "explain the slowest requests of a run"),
    "list": ("hicache.cli.catalog", "list models, machines, workloads, policies and experiments"),
    "check-policy": ("hicache.cli.check_policy", "test a policy class of your own on small runs"),
    "check-storage": ("hicache.cli.check_storage", "test a storage engine of your own"),
    "diff": ("experiments.diff.__main__", "compare two releases of SGLang's or vLLM's cache"),
    "env": ("hicache.env", "print versions and devices for a bug report"),
}
READERS = ("compare", "report", "validate", "explain")  # of stored runs, which may come from anyone


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return
    if "--version" in (name, *sys.argv[2:3]):  # Hydra would print its own
        print(f"hicache {__version__}")
        return
    if name not in COMMANDS:
        from hicache.runs.errors import meant  # Hydra takes a third of a second

        sys.stderr.write(f"hicache: no command {name!r}{meant(name, COMMANDS)}\n{_usage()}\n")
        sys.exit(2)
    module = COMMANDS[name][0]
    sys.path[:] = _import_path(name)
    if module.startswith("experiments.") and not _is_checkout():
        sys.exit(f"hicache {name} needs the repository: run it at the root of a checkout")
    sys.argv[:2] = [f"hicache {name}"]
    # its threads take longer to start than numpy to import, and nothing here multiplies matrices
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        gc.disable()
        command = import_module(module)
        gc.freeze()  # modules stay, so a search for unused objects need not visit them
        gc.enable()
        command.main()
    except ModuleNotFoundError as error:
        from hicache.runs.errors import report_error

        sys.exit(report_error(error))


def _import_path(name: str) -> list[str]:
    # the user's modules, and experiments/ in a checkout, lie in the current directory; so may the
    # files of a run by another author
    if name not in READERS or "--trust" in sys.argv:
        return ["", *sys.path]
    here, ours = Path.cwd(), Path(__file__).parents[2]
    return [each for each in sys.path if Path(each).resolve() != here or here == ours]


def _is_checkout() -> bool:
    return Path("experiments/diff/__main__.py").is_file()


def _usage() -> str:
    lines = ["usage: hicache COMMAND ...", ""]
    for name, (module, purpose) in COMMANDS.items():
        if not module.startswith("experiments.") or _is_checkout():
            lines.append(f"  {name:<15}{purpose}")
    return "\n".join([*lines, "", "`hicache COMMAND --help` describes a command."])
