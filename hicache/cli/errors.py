"""Turns errors of Hydra and OmegaConf into one sentence for the user."""

import re
from collections.abc import Collection
from difflib import get_close_matches
from itertools import takewhile

from hydra.errors import OverrideParseException

from hicache.cli.schema import known_keys

# by optional package, the extra of hicache that installs it
EXTRAS = {
    **dict.fromkeys(("pandas", "pyarrow", "matplotlib", "tabulate", "jinja2"), "analysis"),
    **dict.fromkeys(("torch", "triton", "einops"), "kernels"),
    **dict.fromkeys(("redis", "hiredis"), "storage"),
    "wandb": "wandb",
    "ray": "ray",
    "submitit": "slurm",
}


def missing(package: str) -> str:
    return f"{package} is not installed: pip install 'hicache[{EXTRAS[package]}]'"


def sentence(error: BaseException) -> str:
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
        told += meant(unknown[1].lstrip("+~"), known_keys())
    launcher = re.search(r"hydra/launcher/(ray|submitit)", told)
    if launcher:
        return missing(launcher[1])
    if "BasicLauncherConf" in told:
        told += " (this setting needs hydra/launcher=joblib)"
    if told.startswith("Ambiguous value for argument"):
        told += " (add -m to run every value, or write a list as [a,b])"
    return told


def meant(name: str, known: Collection[str]) -> str:
    """Return " (did you mean ...?)" with the known name that is closest; "" if none is close.

    A known name that ends with `/name`, as metrics may, is preferred.
    """
    group = name[: name.rfind(".") + 1]  # that two settings are of one group makes them not similar
    peers = [each.removeprefix(group) for each in known if each.startswith(group)]
    near = [each for each in known if each.endswith(f"/{name}")]
    near += [group + each for each in get_close_matches(name.removeprefix(group), peers, n=1)]
    near += [] if peers else get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _gist(text: str) -> str:
    said, _, rest = text.strip().partition("\nAvailable options")
    listed = rest.partition("Config search path")[0].splitlines()[1:]
    options = takewhile(bool, map(str.strip, listed))
    wanted = ", ".join(option for option in options if option != "schema")
    # the first line names the error; the others locate it in OmegaConf's terms
    first = said.partition("\n")[0].strip().rstrip(".:")
    return f"{first} (expected one of {wanted})" if wanted else first
