"""Confidence intervals over blocks: what a comparison found, and what it could have found.

A block is a window of a trace, or a seed. The requests of a block share a queue, so one block gives
one number: how far a metric differs between two configurations that served the same requests. The
interval is Student's over these numbers, in the form for paired samples.

A difference of times is a ratio by nature, and a few slow blocks dominate its mean. So for metrics
that are positive in all blocks the numbers are logarithms of ratios, and the interval is one of
their geometric mean. Rates of hits, which may be 0, are compared by differences.

The smallest effect that n blocks find is that at which the test of Student has a power of 0.8, by
the noncentral t distribution (Cohen, Statistical power analysis for the behavioral sciences, 1988,
section 2.3), if blocks differ by the standard deviation that was seen, divided by the median of its
distribution.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from statistics import NormalDist, fmean, stdev

from scipy.optimize import brentq
from scipy.stats import chi2
from scipy.stats import nct as noncentral
from scipy.stats import t as student

CONFIDENCE, POWER = 0.95, 0.8
LEAST_BLOCKS = 3
SOUGHT = 0.05  # the relative effect for which `Estimate.needed` counts blocks
MOST_BLOCKS = 1 << 20
MANY = 200  # blocks, from which on Student's distribution is taken as normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The effect of a configuration on one metric, over blocks.

    Attributes:
        middle: the mean effect: a difference, or a ratio less 1.
        interval: ends of the 95 % interval of the effect; None for fewer than three blocks.
        least: the smallest effect that so many blocks find in 80 of 100 comparisons; None for fewer
            than three blocks.
        needed: how many blocks of this kind find an effect of 5 %; None for fewer than three.
    """

    middle: float
    interval: tuple[float, float] | None
    least: float | None
    needed: int | None


def difference(base: Sequence[float], other: Sequence[float]) -> Estimate:
    """Estimate the mean difference of paired values, one pair per block."""
    found = _student([b - a for a, b in zip(base, other, strict=True)], SOUGHT * abs(fmean(base)))
    return Estimate(middle=found[0], interval=found[1], least=found[2], needed=found[3])


def ratio(base: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Estimate the geometric mean of the ratios of paired values, less 1; one pair per block.

    Return None unless all values are positive.
    """
    if min(*base, *other) <= 0:
        return None
    logs = [log(b / a) for a, b in zip(base, other, strict=True)]
    middle, interval, least, needed = _student(logs, log(1 + SOUGHT))
    return Estimate(
        middle=exp(middle) - 1,
        interval=interval and (exp(interval[0]) - 1, exp(interval[1]) - 1),
        least=None if least is None else exp(least) - 1,
        needed=needed,
    )


def _student(
    values: Sequence[float], sought: float
) -> tuple[float, tuple[float, float] | None, float | None, int | None]:
    middle, count = fmean(values), len(values)
    if count < LEAST_BLOCKS:
        return middle, None, None, None
    spread = stdev(values)
    half = student.ppf((1 + CONFIDENCE) / 2, count - 1) * spread / sqrt(count)
    # that of few blocks is too small more often than too large: divide by its median
    spread /= sqrt(chi2.median(count - 1) / (count - 1))
    counts = range(LEAST_BLOCKS, MOST_BLOCKS)
    needed = counts[0] + bisect_left(counts, x=True, key=lambda n: _least(spread, n) <= sought)
    return middle, (middle - half, middle + half), _least(spread, count), needed


def _least(spread: float, count: int) -> float:
    return _noncentrality(count) * spread / sqrt(count)


@cache
def _noncentrality(count: int) -> float:
    # mean of √n x effect / spread at which the test finds the effect with the wanted power
    if count > MANY:
        return NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
    critical = student.ppf((1 + CONFIDENCE) / 2, count - 1)
    return float(brentq(lambda at: noncentral.sf(critical, count - 1, at) - POWER, 2.5, 20))
