"""Placement of Mamba states: only where a prompt leaves what other prompts had, as Marconi does.

hicache run model=qwen3_next_80b cache.policy=examples.policies.checkpoints:BranchesOnly
"""


class BranchesOnly:
    """Keeps a state at the branch; the end of the answer is kept anyway."""

    def __init__(self, world, *, end: float = 0):
        self.keeps_end = bool(end)

    def checkpoints(self, kind, start, end, branch):
        if kind != "mamba":
            return None
        lengths = [] if branch is None else [branch]
        return [*lengths, end] if self.keeps_end else lengths
