"""Hydra looks for plugins in this namespace package; the sweeper itself is part of hicache."""

from hicache.cli import sweeper


class GridSweeper(sweeper.GridSweeper):
    """See `hicache.cli.sweeper`."""
