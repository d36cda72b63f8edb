"""The sweeper composes a grid's settings as few times as it can."""

from hicache.cli.sweeper import first_of_each_value
from hicache.runs.grid import jobs_of


def jobs(**values: str) -> list[list[str]]:
    grid = {key.replace("__", "."): each.split() for key, each in values.items()}
    return jobs_of({key: [f"{key}={value}" for value in each] for key, each in grid.items()})


def test_each_value_is_composed_once_for_each_choice_of_files_before_the_first_job():
    tried = list(
        first_of_each_value(jobs(storage="none memory", cache__page_size="1 2", seed="0 1 2"))
    )
    assert len(tried) == 2 * (3 + 1)
    assert {tuple(job) for job in tried} >= {
        (storage, "cache.page_size=2", "seed=0") for storage in ("storage=none", "storage=memory")
    }
