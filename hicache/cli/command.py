"""Helpers for all programs: an argument parser, and error messages of one sentence."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.runs.errors import report_error


def parser_of(program: str, usage: str | None) -> ArgumentParser:
    return ArgumentParser(
        prog=program, description=usage, formatter_class=RawDescriptionHelpFormatter
    )


@contextmanager
def in_one_sentence() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        sys.exit(report_error(error))
