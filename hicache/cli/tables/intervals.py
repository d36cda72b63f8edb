"""Confidence intervals of metrics, by bootstrap over windows and sessions.

The requests of a session share their prefix, and the sessions of a window share the queue. So each
draw takes windows with replacement, and from each drawn window as many sessions as it has, again
with replacement. Differences between windows enter the spread once and differences between sessions
nearly twice (Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8),
which makes the intervals conservative.

With few windows the spread of draws is too small by √((n-1)/n), and its tails follow a normal
distribution instead of Student's. Without a correction, 10 to 13 of 100 intervals between identical
policies over eight or ten windows excluded zero. Therefore the ends are percentiles further out, by
the ratio of Student's interval to the normal one: the expanded percentile interval of Hesterberg
(What Teachers Should Know About the Bootstrap, The American Statistician 69, 2015).
docs/validity.md gives the remaining error.
"""

from collections.abc import Iterator
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hicache.cli.tables.request_metrics import Numbers

Places = NDArray[np.int64]

CONFIDENCE = 0.95
LEAST_WINDOWS = 8
LEAST_SESSIONS = 20
NUM_DRAWS = 2_000
DRAWS_AT_ONCE = 100  # bounds the weights of 20,000 requests to some megabytes


def lacking(num_windows: int, num_sessions: int) -> str | None:
    lacks = [
        f"{got:,} {what}, at least {least} are needed"
        for got, least, what in (
            (num_windows, LEAST_WINDOWS, "window(s) or seed(s) (workload.windows, seed)"),
            (num_sessions, LEAST_SESSIONS, "session(s)"),
        )
        if got < least
    ]
    return "; ".join(lacks) or None


def draws(window_of: Places, seed: int = 0) -> Iterator[Numbers]:
    """Draw random samples of sessions for a bootstrap, and count each session in each sample.

    A sample draws parts of the trace (windows) with replacement. From each drawn window it draws as
    many sessions as the window has, again with replacement.

    Args:
        window_of: [sessions], the window number of each session. The numbers start at 0 and are
            sorted.
        seed: the random seed.

    Yields:
        Arrays of counts, [samples, sessions]. All arrays together have `NUM_DRAWS` rows.
    """
    random = np.random.default_rng(seed)
    sizes = np.bincount(window_of)
    starts = np.cumsum(sizes) - sizes
    for _ in range(NUM_DRAWS // DRAWS_AT_ONCE):
        windows = random.integers(len(sizes), size=(DRAWS_AT_ONCE, len(sizes)))
        each = np.repeat(windows.ravel(), sizes[windows.ravel()])  # by session to draw: its window
        sessions = starts[each] + (random.random(len(each)) * sizes[each]).astype(np.int64)
        rows = np.repeat(np.arange(DRAWS_AT_ONCE), sizes[windows].sum(axis=1))
        shape = (DRAWS_AT_ONCE, len(window_of))
        counts = np.bincount(
            np.ravel_multi_index((rows, sessions), shape), minlength=np.prod(shape)
        )
        yield counts.reshape(shape).astype(float)


def ends(drawn: Numbers, num_windows: int) -> tuple[float, float]:
    further = sqrt(num_windows / (num_windows - 1)) * _student(num_windows - 1)
    tail = 100 * NormalDist().cdf(-further)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def _student(degrees: int) -> float:
    # quantile of Student's t by the expansion of Abramowitz and Stegun, 26.7.5, which is 0.0006 too
    # small at 7 degrees of freedom
    x = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))
