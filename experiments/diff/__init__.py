"""What a change to an engine's prefix cache does to hits, bytes and evictions, on real requests.

`python -m experiments.diff --engine sglang --base 0.5.22 --head 0.5.23` runs two releases (or
checkouts, or ours) side by side, each in a process and an environment of its own, on the same
requests and pools (`docs/diff.md`). `protocol` is the seam that another engine is added behind.
"""
