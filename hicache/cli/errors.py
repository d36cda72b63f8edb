"""What Hydra and OmegaConf complain about, in one sentence for the person at the keyboard."""

import difflib
import re
from itertools import takewhile

from hydra.errors import OverrideParseException

from hicache.cli.schema import known_keys

# the extra of this package that installs each optional package
EXTRAS = {
    **dict.fromkeys(("pandas", "pyarrow", "matplotlib", "tabulate", "jinja2"), "analysis"),
    **dict.fromkeys(("torch", "triton", "einops"), "kernels"),
    **dict.fromkeys(("redis", "hiredis"), "storage"),
    "wandb": "wandb",
    "ray": "ray",
    "submitit": "slurm",
}


def missing(package: str) -> str:
    """The sentence for an optional package that is not installed."""
    return f"{package} is not installed: pip install 'hicache[{EXTRAS[package]}]'"


def sentence(error: BaseException) -> str:
    """What was given and what was wanted, on one line, with the nearest knob if one is unknown."""
    if isinstance(error, OverrideParseException):
        return (
            f"cannot parse {error.override}: expected KEY=VALUE; quote a value that contains "
            f"special characters: 'KEY=\"VALUE\"'"
        )
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = _gist(str(cause))
        if text and not any(text in part for part in parts):
            parts.append(text)
        cause = cause.__cause__
    told = ": ".join(parts) or type(error).__name__
    unknown = re.search(r"Could not (?:override|append to config)[^']*'([^']+)'", told)
    if unknown:
        near = difflib.get_close_matches(unknown[1].lstrip("+~"), known_keys(), n=1)
        told += f" (did you mean {near[0]}?)" if near else ""
    launcher = re.search(r"hydra/launcher/(ray|submitit)", told)
    if launcher:
        return missing(launcher[1])
    if "BasicLauncherConf" in told:
        told += " (this setting needs hydra/launcher=joblib)"
    if told.startswith("Ambiguous value for argument"):
        told += " (add -m to run every value, or write a list as [a,b])"
    return told


def _gist(text: str) -> str:
    said, _, rest = text.strip().partition("\nAvailable options")
    listed = rest.partition("Config search path")[0].splitlines()[1:]
    options = takewhile(bool, map(str.strip, listed))
    wanted = ", ".join(option for option in options if option != "schema")
    # the first line says what is wrong; those below say where in OmegaConf's terms
    first = said.partition("\n")[0].strip().rstrip(".:")
    return f"{first} (expected one of {wanted})" if wanted else first
