import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread():
    """Blocks are small: a second thread costs more than it does, and far more beside others."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
