"""The time of SGLang's copies: events are done at once, or once so many requests have come."""

from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The time that copies depend on: the number of requests so far."""

    now = 0
    delay = 0

    @classmethod
    @contextmanager
    def at_once(cls) -> Iterator[None]:
        """Let copies that start meanwhile be done at once."""
        delay, cls.delay = cls.delay, 0
        try:
            yield
        finally:
            cls.delay = delay


class Event:
    """A stream, or an event with nothing before it but the clock's delay."""

    def __init__(self, *_: object, **__: object) -> None:
        self._due = 0

    def record(self, *_: object) -> None:
        """Be done `Clock.delay` requests from now."""
        self._due = Clock.now + Clock.delay

    def query(self) -> bool:
        """True if it is done."""
        return Clock.now >= self._due

    def elapsed_time(self, _: object) -> float:
        """Return no time: times are not compared."""
        return 0.0

    def wait(self, *_: object) -> None:
        """Wait for nothing."""

    wait_stream = wait_event = synchronize = wait
