"""Writes the numbers of a run to files, and copies them to W&B.

Each row reaches `metrics.jsonl` as soon as it exists, so a killed run keeps its rows. For the same
reason the W&B log is flushed every second (W&B's default of 15 s loses all rows of a shorter run).
"""

import json
import netrc
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self
from urllib.parse import urlparse

from hicache.config import TrackerConfig, WandbMode
from hicache.results.metrics import Row
from hicache.results.requests_file import read_requests
from hicache.results.verdict import in_short, objections
from hicache.secret import masked
from hicache.user_code import Stopped

if TYPE_CHECKING:
    import pandas as pd
    import wandb

FLUSH_S = 1  # seconds of W&B rows that a kill -9 may lose
INIT_TIMEOUT_S = 30.0  # W&B waits 90 s for a server that does not answer
ALWAYS = ("request/", "cache/", "load/")  # areas of metrics whose zeros W&B gets, too
MAX_TAG = 64  # characters that W&B allows in a tag
TERMINATED = 143  # exit code of a process that SIGTERM ended: 128 + 15


@dataclass
class Tracker:
    """Writes the metrics of a run to files, and optionally to Weights & Biases (W&B).

    The files are `metrics.jsonl` and `summary.json` in `out_dir`. Use the tracker as a context
    manager. While it is open, SIGTERM raises `SystemExit`, so that W&B learns that the run has
    failed.
    """

    out_dir: Path
    tracker: TrackerConfig
    config: Mapping[str, object]
    group: str
    name: str
    job_type: str | None = None
    tags: Sequence[str] = ()
    _wandb: "wandb.Run | None" = field(default=None, init=False)
    _old_handler: Any = field(default=None, init=False)  # the return value of signal.signal

    def log(self, row: Row) -> None:
        self._append(json.dumps(row).encode() + b"\n")
        if self._wandb is not None:
            self._wandb.log(dict(row))  # with an explicit step W&B would hold back the last row

    def attach(self, paths: Sequence[Path]) -> None:
        if self._wandb is not None:
            _attach(self._wandb, paths)
            _show(self._wandb, paths)

    def summarize(self, summary: Mapping[str, float]) -> None:
        write_json(self.out_dir / "summary.json", summary)
        if self._wandb is not None:
            # without the zeros of what the run does not use
            shown = {key: each for key, each in summary.items() if each or key.startswith(ALWAYS)}
            self._wandb.summary.update({**shown, "verdict": in_short(objections([summary]))})
            if self.tracker.wandb_requests:
                import wandb

                table = wandb.Table(dataframe=read_requests(self.out_dir))
                self._wandb.log({"requests": table})

    def __enter__(self) -> Self:
        self._metrics = (self.out_dir / "metrics.jsonl").open("wb", buffering=0)
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _terminate)
        self._wandb = _open_wandb(
            self.tracker,
            dir=self.out_dir,
            config=_known(self.config),
            group=self.group,
            name=self.name,
            job_type=self.job_type,
            tags=[tag[:MAX_TAG] for tag in self.tags],
        )
        if self._wandb is not None:
            self._wandb.define_metric("*", step_metric="time_s")  # the x-axis of its charts
        return self

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=_exit_code(exc))
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    def _append(self, line: bytes) -> None:
        # writes a whole row or none, even if the disk is full
        end = self._metrics.tell()
        left = line
        try:
            while left:
                left = left[self._metrics.write(left) :]
        except OSError:
            self._metrics.truncate(end)
            raise


def _terminate(*_: object) -> NoReturn:
    raise Stopped(TERMINATED)


def track_sweep(
    directory: Path,
    tracker: TrackerConfig,
    group: str,
    grid: Mapping[str, Sequence[str]],
    tables: Mapping[str, "pd.DataFrame"],
    notes: Sequence[str],
) -> None:
    """Upload the results of a sweep to Weights & Biases (W&B) as one run.

    The run has `tables` and `notes` as the terminal shows them (its summary repeats the first
    note), `grid` as its settings, and the figures and files of the sweep. It joins the W&B group
    `group`, as do the runs of the sweep. A second call for the same directory updates the first
    upload.
    """
    run = _open_wandb(
        tracker,
        dir=directory,
        group=group,
        name="summary",
        config=dict(grid),
        notes="\n\n".join(notes),
        job_type="summary",
        id=sha256(str(directory.absolute()).encode()).hexdigest()[:16],
        resume="allow",
    )
    if run is None:
        return
    import wandb

    for name, table in tables.items():
        if table.empty:
            continue
        told = table.rename(columns=lambda each: str(each).replace("\n", " "))
        run.log({name: wandb.Table(dataframe=told)})
    if notes:
        run.summary["finding"] = notes[0]
    paths = sorted(directory.glob("sweep.*"))
    _attach(run, paths)
    _show(run, paths)
    run.finish()


def sync_command(directory: Path) -> str | None:
    """Return the command that uploads the offline W&B runs of a sweep; None if there are none."""
    runs = "wandb/offline-run-*"
    if not any(directory.glob(runs)) and not any(directory.glob(f"*/{runs}")):
        return None
    place = shlex.quote(str(directory))
    return f"wandb sync {place}/wandb/offline-run-* {place}/*/wandb/offline-run-*"


def _show(run: "wandb.Run", paths: Sequence[Path]) -> None:
    import wandb

    kinds: dict[str, Any] = {".png": wandb.Image, ".html": wandb.Html}
    shown = [path for path in paths if path.suffix in kinds]
    panels = {path.name.replace(".", "_"): kinds[path.suffix](str(path)) for path in shown}
    if panels:
        run.log(panels)


def _attach(run: "wandb.Run", paths: Sequence[Path]) -> None:
    folder = Path(run.dir)
    for path in paths:
        # by default W&B makes a symbolic link, which breaks if the run is moved
        shutil.copyfile(path, folder / path.name)
        run.save(folder / path.name, base_path=folder, policy="end")


def _open_wandb(tracker: TrackerConfig, **about: Any) -> "wandb.Run | None":
    mode = tracker.wandb_mode
    if mode is WandbMode.disabled:
        return None
    if mode is not WandbMode.online and find_spec("wandb") is None:
        _say_not_installed()
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # import only if needed: it takes half a second

    # W&B imports its launcher of jobs for inputs that no run here has, and pandas for each picture
    wandb.Run._detect_and_apply_job_inputs = lambda _: None  # type: ignore[method-assign,assignment]
    wandb.util.pd_available = False  # compares names of types instead

    def start(mode: Literal["online", "offline"]) -> "wandb.Run":
        return wandb.init(
            project=tracker.project,
            mode=mode,
            reinit="create_new",  # a sweep opens several runs in one process
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                init_timeout=INIT_TIMEOUT_S,
                silent=True,
                x_disable_stats=True,
                x_save_requirements=False,  # provenance.json has the versions
                x_transaction_log_flush_interval=FLUSH_S,
            ),
            **about,
        )

    if mode is WandbMode.online:
        if not _has_key():
            _say("W&B has no API key here, so this run is logged offline")
            return start("offline")
        try:
            return start("online")
        except wandb.Error as error:
            _say(masked(f"W&B cannot be reached ({error}), so this run is logged offline"))
    return start("offline")


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    # a panel shows a group without values as an empty line
    known = {k: _known(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {key: value for key, value in known.items() if value not in (None, {})}


def plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file completely, or leave the old file unchanged.

    Keys are sorted, so equal values give equal bytes.
    """
    text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(text)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _exit_code(exc: BaseException | None) -> int:
    if isinstance(exc, SystemExit) and isinstance(exc.code, int):
        return exc.code
    return 0 if exc is None else 1


@cache  # once in each process of a sweep
def _say_not_installed() -> None:
    _say("no wandb/ directory: W&B is not installed (pip install 'hicache[wandb]')")


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
