"""Repeat a sweep with more seeds until its intervals are narrow.

hicache run -m cache.host_gib=64,128 --until 0.05
hicache run experiment=prefetch_stop --until 0.02 --metric request/ttft_s_p95 --most 16

The sweep starts with three seeds. It ends when half of the 95 % interval of the metric is at most
the given width for every arm, or with `--most` seeds. For one arm, this is the interval of the
metric; for several, that of the difference of each arm from its baseline. The width is relative,
but for rates and shares it is a difference. Whether an effect is significant never ends the sweep,
since that would find effects where there are none.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from math import ceil, log
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.runs.grid import new_dir, read_choices
from hicache.runs.schema import config_of, grid_of

FIRST, MOST = 3, 32  # seeds


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("hicache run", __doc__)
    parser.add_argument("overrides", nargs="*", help="settings and a grid without seed")
    parser.add_argument("-m", "--multirun", action="store_true", help="not needed here")
    parser.add_argument("--until", type=float, required=True, metavar="WIDTH")
    parser.add_argument("--metric", help="key of summary.json; the first of `metrics` by default")
    parser.add_argument("--most", type=int, default=MOST, help="number of seeds at which to stop")
    options = parser.parse_intermixed_args(arguments)
    with in_one_sentence():
        _run(options)


def _run(options: Namespace) -> None:
    if not options.until > 0 or options.most < FIRST:
        raise ValueError(f"--until must be above 0, and --most at least {FIRST}")
    own = [each for each in options.overrides if each.partition("=")[0] != "hydra.sweep.dir"]
    grid = {key: each for key, each in grid_of(*own).items() if key != "seed"}
    if any(each.startswith("seed=") for each in own):
        raise ValueError("--until chooses the seeds: leave out seed")
    config = config_of(*(each for each in own if "," not in each))
    given = [each.partition("=")[2] for each in options.overrides if each not in own]
    directory = Path(*given) if given else new_dir(config.name)
    metric = options.metric or config.metrics[0]
    is_begun = (directory / "multirun.yaml").is_file()
    num_seeds = max(FIRST, len(read_choices(directory)["seed"]) if is_begun else 0)
    while True:
        seeds = "seed=" + ",".join(map(str, range(num_seeds)))  # first, so that jobs keep numbers
        command = [sys.executable, "-m", "hicache", "run", "-m", seeds, *grid.values(), *own]
        command += ["hydra.sweeper.params=null", f"hydra.sweep.dir={directory}"]
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.exit(code)
        width = widest(directory, metric)
        print(f"{num_seeds} seeds: {metric} is known to ±{width:.2g} (wanted {options.until:g})")
        if width <= options.until or num_seeds >= options.most:
            return
        wanted = ceil(num_seeds * (width / options.until) ** 2)  # widths fall with the square root
        num_seeds = min(max(wanted, num_seeds + 1), 2 * num_seeds, options.most)


def widest(directory: Path, metric: str) -> float:
    """Return half of the widest interval of a metric in a sweep over at least three seeds.

    Raises:
        ValueError: a run has no such metric, or fewer than three seeds can be compared.
    """
    from hicache.cli.tables.groups import answer_sets, compared_groups
    from hicache.cli.tables.intervals import Estimate, difference, ratio
    from hicache.cli.tables.paired import RATES, Pairs

    groups = compared_groups([directory])
    found: list[tuple[Estimate | None, Estimate]] = []
    if len(groups) == 1:
        values = groups[0].values(metric)
        same = [1.0] * len(values)
        relative = None if metric.endswith(RATES) else ratio(same, values)
        found.append((relative, difference(same, values)))
    for baseline, *others in answer_sets(groups) if len(groups) > 1 else ():
        for other in others:
            told = Pairs(baseline, other).differences([metric])[metric]
            found.append((told.relative, told.absolute))
    widths = []
    for relative, absolute in found:
        judged = relative or absolute
        if judged.interval is None:
            raise ValueError(f"{directory}: fewer than {FIRST} seeds are comparable")
        low, high = judged.interval
        widths.append(log((1 + high) / (1 + low)) / 2 if relative else (high - low) / 2)
    return max(widths)
