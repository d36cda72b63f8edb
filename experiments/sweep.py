"""temp"""

from hydra.experimental.callback import Callback


class SweepEnd(Callback):
    """Does nothing yet."""

    pass
