"""SGLang's own prefix cache on a CPU, in an environment of its own; nothing of ours needs it.

What a GPU would do is stood in for (`device`, `memory`); every decision - matching, eviction,
write-through, load-back, prefetch - is the package's own code. `dialect` lists what differs from
release to release.
"""
