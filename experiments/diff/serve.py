"""The program of one side: answers one line at a time, as `experiments.diff.protocol` says."""

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import IO, Any

from experiments.diff.protocol import Pools, Side, SideError, tokens_from_json


def main(module: str) -> None:
    """Serve the side of a module; what is printed goes to the log."""
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(module, sys.stdin, wire)
    os._exit(0)  # engines leave threads behind that wait for ever


def serve(module: str, questions: IO[str], answers: IO[str]) -> None:
    """Answer until the questions end, one of them is `close`, or the side cannot go on."""
    side: Side | None = None
    for line in questions:
        question = json.loads(line)
        try:
            if "open" in question:
                side, answer = _open(module, question["open"])
            else:
                if side is None:
                    raise SideError("a side was asked before it was opened")
                answer = _answer(side, question)
        except SideError as error:
            answer = {"error": (str(error).splitlines() or [""])[0]}
        except Exception as error:
            traceback.print_exc()  # the whole story, for the log
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer or "close" in question:
            return


def _open(module: str, settings: dict[str, dict[str, Any]]) -> tuple[Side, dict[str, object]]:
    try:
        opener = importlib.import_module(module).open_side
    except Exception as error:  # whatever a release does when it is imported
        traceback.print_exc()
        raise SideError(f"it does not import: {type(error).__name__}: {error}") from error
    side: Side = opener(Pools(**settings["pools"]), settings["options"])
    return side, {"about": side.about()}


def _answer(side: Side, question: dict[str, object]) -> dict[str, object]:
    if "admit" in question:
        finished: list[int] = question["finish"]  # type: ignore[assignment]
        for number in finished:
            side.finish(number)
        tokens = tokens_from_json(str(question["tokens"]))
        outcome = side.admit(int(question["admit"]), tokens, int(question["prompt_len"]))  # type: ignore[call-overload]
        return asdict(outcome)
    if "probe" in question:
        return {"spans": side.probe(tokens_from_json(str(question["probe"])))}
    if "close" in question:
        side.close()
        return {}
    raise SideError(f"asked {sorted(question)}, which is none of open, admit, probe and close")
