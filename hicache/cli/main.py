"""The `hicache` command: one subcommand per program."""

import sys
from importlib import import_module, util

from hicache.cli.job import report_error

COMMANDS = {
    "run": ("hicache.cli.run", "run one experiment, or a sweep of them"),
    "compare": ("hicache.cli.compare", "compare stored runs or sweeps"),
    "size": ("hicache.cli.size", "find how much host memory a workload can use"),
    "validate": ("hicache.cli.validate", "compare a run with the log of a server"),
    "calibrate": ("hicache.cli.calibrate", "find a server's constant from its log"),
    "explain": ("hicache.cli.explain.command", "explain the slowest requests of a run"),
    "check-policy": ("hicache.cli.check_policy", "test a policy class of your own on small runs"),
    "diff": ("experiments.diff.__main__", "compare two releases of SGLang's or vLLM's cache"),
    "env": ("hicache.env", "print versions and devices for a bug report"),
}
USAGE = "\n".join(
    ["usage: hicache COMMAND ...", ""]
    + [f"  {name:<14}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    + ["", "`hicache COMMAND --help` describes a command."]
)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(USAGE)
        return
    if name not in COMMANDS:
        sys.exit(f"hicache: there is no command {name!r}\n{USAGE}")
    sys.path.insert(0, "")  # the user's modules, and experiments/ in a checkout
    module = COMMANDS[name][0]
    if module.startswith("experiments.") and util.find_spec("experiments") is None:
        sys.exit(f"hicache {name} needs the repository: run it at the root of a checkout")
    sys.argv[:2] = [f"hicache {name}"]
    try:
        import_module(module).main()
    except ModuleNotFoundError as error:
        sys.exit(report_error(error))
