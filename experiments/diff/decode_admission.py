"""Admissions of a simulated decode engine beside SGLang's own arithmetic on the same states.

python -m experiments.diff.decode_admission [RELEASE] [setting=value ...]
"""

import json
import subprocess
import sys
from typing import Any

from experiments.diff.engines import ENGINES, environment_of, prepare
from hicache import experiment
from hicache.runs.schema import config_of
from hicache.scheduler.intake import Intake, needed_tokens, promised_room

SETTINGS = (
    *("model=llama3_8b", "workload=mooncake_conversation", "workload.limit=1000", "storage=memory"),
    *("parallel.prefill=3", "parallel.decode=1", "parallel.tp=1", "cache.device_gib=30"),
    *("workload.time_scale=0.5", "scheduler.batching=prefill_first"),
)


def recorded(*words: str) -> list[dict[str, Any]]:
    """The states in which a decode engine decided about requests, with what it decided."""
    states: list[dict[str, Any]] = []
    decide = Intake._lacks

    def record(self: Intake, req: Any, match: Any) -> Any:
        rules, page, cache = self.cache.rules, self._page, self.cache
        running = self.decode.running
        num_active = len(running) + len(self.loading)
        held_len, pending = match.device_prefix_len, self._pending_restores()
        lacks = decide(self, req, match)
        states.append(
            {
                "prompt_len": req.target_len,
                "max_new": req.remaining_output,
                "held_len": held_len,
                "running": [
                    (r.request.prompt_len, r.decoded, r.request.output_len) for r in running
                ],
                "num_transfers": len(self.loading),
                "available": cache.available_size(0),
                "evictable": cache.evictable_size(0),
                "pending": pending,
                "page": page,
                "reserved": rules.decode_reserved_tokens,
                "needed": needed_tokens(req, req.target_len - held_len, running, rules, page),
                "room": cache.room() - promised_room(running, num_active, rules) - pending,
                "is_admitted": lacks is None,
            }
        )
        return lacks

    Intake._lacks = record  # type: ignore[method-assign]
    try:
        experiment.run(config_of(*SETTINGS, *words))
    finally:
        Intake._lacks = decide  # type: ignore[method-assign]
    return states


def main() -> int:
    """Print how many decisions agree; 1 if any does not."""
    words = sys.argv[1:]
    release = words.pop(0) if words and "=" not in words[0] else "0.5.23"
    states = recorded(*words)
    launch = prepare(ENGINES["sglang"], release)
    done = subprocess.run(
        [launch.interpreter, "-m", "experiments.diff.sglang.admission"],
        input="\n".join(map(json.dumps, states)),
        env=environment_of(launch),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(theirs) == len(states), f"{len(theirs)} answers for {len(states)} states"
    wrong = [
        (state, answer)
        for state, answer in zip(states, theirs, strict=True)
        if [state["needed"], state["room"]] != answer
        or state["is_admitted"] != (answer[0] <= answer[1])
    ]
    num_admitted = sum(state["is_admitted"] for state in states)
    print(
        f"{len(states)} decisions, {num_admitted} admissions: {len(states) - len(wrong)} equal to "
        f"those of {launch.name}"
    )
    for state, answer in wrong[:3]:
        print(f"hicache {state}\nSGLang needs and has room for {answer}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
