"""SGLang's own prefix cache on a CPU, in its own environment; hicache does not depend on it.

Stand-ins replace the GPU (`device`, `memory`). Every decision (matching, eviction, write-through,
load-back, prefetch) is the package's own code. The releases are 0.5.22 and later ones.
"""
