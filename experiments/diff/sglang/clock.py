"""Time of SGLang's copies: events complete at once, or after a number of requests."""

from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    now = 0
    delay = 0

    @classmethod
    @contextmanager
    def at_once(cls) -> Iterator[None]:
        """Return a context in which copies complete as soon as they start."""
        delay, cls.delay = cls.delay, 0
        try:
            yield
        finally:
            cls.delay = delay


class Event:
    """A stand-in for a CUDA stream or event, which completes after a given number of requests."""

    def __init__(self, *_: object, **__: object) -> None:
        self._due = 0

    def record(self, *_: object) -> None:
        self._due = Clock.now + Clock.delay

    def query(self) -> bool:
        return Clock.now >= self._due

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def wait(self, *_: object) -> None: ...

    wait_stream = wait_event = synchronize = wait
