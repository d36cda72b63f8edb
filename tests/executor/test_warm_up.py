"""A warm-up compiles all kernels that a step launches, so no request waits for the compiler."""

import json
import os
import subprocess
import sys

STEPS = """
import json, torch
from hicache.workbench.stand_in import stand_in

driver = stand_in()
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.plane import TRITON
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import Stretch
from hicache.kernels import append, attend, copy, index, scan
from tests.executor.cpu_pools import cpu_pools
from tests.executor.streams import PlacedStream
from tests.executor.one_sequence import PAGE, TOKENS, shape_of

kernels = (
    append._append_kernel, attend._split_kernel, attend._merge_kernel, scan._scan_kernel,
    copy._copy_kernel, index._page_table_kernel,
)
def num_compiled():
    return [len(kernel.device_caches[0][0]) for kernel in kernels]

config = shape_of("FtI S W M D", head_dim=16)
model = ReferenceModel(config, page_size=PAGE)
model.together = 4
pools = cpu_pools(config, PAGE, (16, 16, 3, 16), (1, 1, 1, 1), tp=2, plane=TRITON)
streams = CopyStreams(PlacedStream(is_late=False), PlacedStream(is_late=False))
runner = ModelRunner(model, pools, streams)
runner.warm_up()
warm, driver.num_launches = num_compiled(), 0
pages = [list(range(8))] * 4
for start, end in ((0, 61), (40, 41), (41, 60)):
    both = [Stretch(TOKENS, start, end, pages, 0, [(end - 1, 2)]), Stretch(TOKENS, 3, 5, pages, 1)]
    model.forward(PagedKvView(pools, both, model.together))
    pools.clear_state([1])
    pools.copy_states([1], [2])
print(json.dumps([warm, num_compiled(), driver.num_launches, len(driver.loaded)]))
"""


def test_a_step_compiles_nothing_after_a_warm_up():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    warm, served, num_launches, num_loaded = json.loads(ran.stdout)
    assert all(warm)
    assert served == warm
    assert num_launches > 100 > num_loaded
