"""Distributions given by a few measured quantiles, as the generators use them."""

from collections.abc import Sequence

import numpy as np


class Quantiles:
    """A distribution through measured points, interpolated in the logarithm of the value.

    `shares` rise from 0 to 1; `values` are positive and do not fall. The ends are the least and
    the greatest value that is ever drawn.
    """

    def __init__(self, shares: Sequence[float], values: Sequence[float]) -> None:
        if len(shares) != len(values) or shares[0] != 0 or shares[-1] != 1:
            raise ValueError(f"shares must go from 0 to 1, one a value: got {shares}, {values}")
        if min(values) <= 0 or min(np.diff(shares)) <= 0 or min(np.diff(values)) < 0:
            raise ValueError(f"shares must rise and positive values not fall: {shares}, {values}")
        self._shares = np.array(shares, np.float64)
        self._logs = np.log(np.array(values, np.float64))

    def draw(self, rng: np.random.Generator) -> float:
        """One value."""
        return float(np.exp(np.interp(rng.random(), self._shares, self._logs)))

    def draw_len(self, rng: np.random.Generator) -> int:
        """One value as a number of tokens or turns, at least 1."""
        return max(round(self.draw(rng)), 1)
