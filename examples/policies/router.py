"""Which of several engines serves a request: much of its prompt is held, and few requests wait.

hicache run parallel.replicas=4 cache.policy=examples.policies.router:PrefixAndQueue
"""


class PrefixAndQueue:
    """Takes the engine of the highest held share of the prompt, less `weight` for each waiter."""

    def __init__(self, world, *, weight: float = 0.1):
        self.weight = weight

    def route(self, request, engines):
        def score(number):
            held = engines[number].held_tokens(request) / request.prompt_len
            return held - self.weight * engines[number].num_waiting, -engines[number].num_requests

        return max(range(len(engines)), key=score)
