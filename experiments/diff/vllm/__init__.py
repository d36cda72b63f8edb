"""vLLM's own scheduler, block pool and CPU offloading, on a CPU; hicache does not depend on it.

Every decision (matching, allocation, eviction, offload, load, admission) is the package's own code:
its `Scheduler` with the `OffloadingConnector`. A stand-in replaces the worker: sampled tokens come
from the trace, and a copy is done at once or some requests later. `dialect` lists the differences
between releases.
"""
