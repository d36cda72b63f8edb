"""Random states of an engine in which a request is up for admission."""

from random import Random
from types import SimpleNamespace

CASES = 100_000
PAGES = (1, 16, 64)
WINDOWS = (1, 63, 64, 128, 1000, 1024, 4096)
State = SimpleNamespace  # `drawn` sets its fields


def drawn(random: Random) -> State:
    """Return a random request and random amounts of free space, for tests of admission.

    All amounts are in tokens, except `swa_pages`, which counts sliding-window pages.
    """
    page, window = random.choice(PAGES), random.choice(WINDOWS)
    swa_pages = random.randint(1, 400)
    return SimpleNamespace(
        page=page,
        window=window,
        extend=random.randint(1, 20_000),
        new=random.randint(0, 4096),
        chunk=random.choice([64, 512, 2048, 8192]),
        swa_host_hit=random.choice([0, 0, random.randint(1, window)]),
        device_prefix=random.randint(0, 400) * page,
        host_prefix=random.choice([0, random.randint(0, 40) * page]),
        full_room=random.randint(1, 1500) * page,
        swa_pages=swa_pages,
        swa_room=random.randint(0, swa_pages) * page,
        reserved=random.choice([0, 5000]),
        reserved_swa=random.choice([0, page, 700]),
    )
