"""Classes and functions of the user, named as `module:name`: loads them, and names their faults."""

import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OURS = Path(__file__).parent
_PYTHON = sysconfig.get_path("stdlib")
_NAMED = re.compile(r"[\w-]+(\.[\w-]+)*:\w+(\.\w+)*")


class Stopped(SystemExit):
    """Raised by a signal handler to end the program, also while code of the user runs."""


class UserCodeError(RuntimeError):
    """Raised when code of the user fails, ends the program or returns a wrong value.

    The message names the class and the call. `place` is the source line that defines the called
    method, in the form of a traceback. It is empty if the method itself raised an exception, whose
    traceback shows a more exact line.
    """

    def __init__(self, told: str, place: str = "") -> None:
        super().__init__(told)
        self.place = place

    def own_frames(self) -> str:
        """Return the traceback of the user's code, without the frames of hicache that called it."""
        cause = self.__cause__
        frames = cause.__traceback__ if cause is not None else None
        while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if cause is None or (frames is None and not isinstance(cause, SyntaxError)):
            return self.place
        lines = traceback.format_exception(cause.with_traceback(frames), chain=False)
        return "".join(lines).rstrip()


def _is_ours(file: str) -> bool:
    path = Path(file)
    is_of_python = path.is_relative_to(_PYTHON) and "site-packages" not in path.parts
    return path.is_relative_to(_OURS) or is_of_python or file.startswith("<frozen ")


@contextmanager
def user_code(what: str, *passes: type[BaseException]) -> Iterator[None]:
    """Return a context for code of the user: what it raises becomes a `UserCodeError`.

    Ctrl-C, signals and exceptions of the types `passes` are not changed. `what` names the class and
    the call in the error.
    """
    try:
        yield
    except BaseException as error:  # also SystemExit, so that no policy can end a run with code 0
        if isinstance(error, (KeyboardInterrupt, Stopped, UserCodeError, *passes)):
            raise
        raise UserCodeError(f"{what} raised {told(error)}") from error


def loaded(setting: str, name: str) -> Callable[..., Any]:
    """Import and return the object `name`, which the setting `setting` names as `module:name`.

    Raises:
        ValueError: there is no such object.
        UserCodeError: its module fails while it is imported.
    """
    hint = "name it as module:Class, with the module in this directory or on PYTHONPATH"
    module, _, attribute = name.partition(":")
    if _NAMED.fullmatch(name) is None:
        raise ValueError(f"{setting}={name} cannot be loaded: it has another form; {hint}")
    try:
        with user_code(f"{setting}={name}: the import of {module}", ImportError):
            found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        if module == "__main__":
            hint = "a class of a script cannot be found later, so put it into a module of its own"
        raise ValueError(f"{setting}={name} cannot be loaded: {error}; {hint}") from error
    if not callable(found):
        raise ValueError(f"{setting}={name} must be a class or a function, got {found!r:.80}")
    return found  # type: ignore[no-any-return]


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.300}" if str(error) else type(error).__name__


def place_of(thing: object) -> str:
    try:
        lines, number = inspect.getsourcelines(thing)  # type: ignore[arg-type]
        file = inspect.getsourcefile(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
    name = getattr(thing, "__qualname__", "")
    return f'  File "{file}", line {number}, in {name}\n    {lines[0].strip()}'
