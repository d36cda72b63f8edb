"""The must-read path: the files of the core in which `make replay` runs a function."""

import ast
import inspect
import io
import sys
import tokenize
from pathlib import Path
from types import FrameType

from hicache import experiment
from hicache.config import ExperimentConfig
from hicache.runs.schema import config_of

CORE = ("engine/", "scheduler/", "cache/", "executor/simulated/", "experiment.py")
# what a replay reaches today; the numbers may only fall (the limits were 35 files and 4,300 lines,
# before placement by chunk, eviction of mirrors, the engines' own orders of a step, several batches
# in flight, what vLLM keeps of windows, the event queue of engines, loads that no step overlaps,
# speculation, separate engines for prefill and decode, pipeline stages, events of arrivals, reads
# from peers' hosts and requests that a policy holds back came in)
MOST_FILES = 34
MOST_LINES = 5_484
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def test_only_lines_of_code_are_counted():
    source = (
        '"""One,\n\ntwo."""\n\nX = """a\nb"""\n# no\ndef f():\n'
        '    """Doc."""\n    return (\n        1\n    )\n'
    )
    assert code_lines(source) == 6


def files_of(config: ExperimentConfig) -> set[str]:
    """Return the files in which a replay calls a function."""
    files: set[str] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # no module, no class body, no comprehension that one of them may run
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<":
            files.add(code.co_filename)

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        experiment.run(config)
    finally:
        sys.setprofile(before)
    return files


def test_the_path_of_a_replay_has_a_bounded_number_of_files_and_lines():
    package = Path(__file__).parents[1] / "hicache"
    files = sorted(map(Path, files_of(config_of("workload.num_sessions=60"))))
    inside = [str(each.relative_to(package)) for each in files if each.is_relative_to(package)]
    reached = {
        name: code_lines((package / name).read_text()) for name in inside if name.startswith(CORE)
    }
    assert {"engine/loop.py", "scheduler/scheduler.py", "cache/prefix_cache.py"} <= set(reached)
    listed = "\n".join(f"{lines:5} {name}" for name, lines in reached.items())
    assert len(reached) <= MOST_FILES, listed
    assert sum(reached.values()) <= MOST_LINES, f"remove some lines\n{listed}"
