"""Effect of a change to an engine's prefix cache on hits, bytes and evictions, on real requests.

`python -m experiments.diff --engine sglang --base 0.5.22 --head 0.5.23` runs two sides (releases,
checkouts, or ours), each in its own process and environment, on the same requests and pools
(`docs/diff.md`). `protocol` is the interface of an engine.
"""
