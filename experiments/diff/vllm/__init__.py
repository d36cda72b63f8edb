"""vLLM's own scheduler, block pool and CPU offloading, on a CPU; nothing of ours needs it.

Every decision - matching, allocation, eviction, what is offloaded and loaded, admission - is the
package's own code: its `Scheduler` with the `OffloadingConnector`. Stood in for is the worker:
sampled tokens are those of the trace, and a copy is done when it is asked for (or so many requests
later). `dialect` lists what differs from release to release.
"""
