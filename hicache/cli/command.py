"""Helpers for all programs: an argument parser, and error messages of one sentence."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.cli.job import report_error
from hicache.user_code import Stopped


def parser_of(program: str, usage: str | None) -> ArgumentParser:
    return ArgumentParser(
        prog=program, description=usage, formatter_class=RawDescriptionHelpFormatter
    )


@contextmanager
def in_one_sentence() -> Iterator[None]:
    try:
        yield
    except Stopped:
        raise
    except (Exception, SystemExit) as error:  # no class of the user ends a program with code 0
        sys.exit(report_error(error))
