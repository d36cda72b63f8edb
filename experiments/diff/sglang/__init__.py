"""SGLang's own prefix cache on a CPU, in its own environment; hicache does not depend on it.

Stand-ins replace the GPU (`device`, `memory`). Every decision (matching, eviction, write-through,
load-back, prefetch) is the package's own code. `dialect` lists the differences between releases.
"""
