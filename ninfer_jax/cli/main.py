"""Entry point of ``ninfer-jax``: parses a verb, runs it, turns mistakes into one line and exit code 2.

Owns the parser and the exit codes; each verb owns its own arguments and output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ninfer_jax.cli import bench, chat, demo, doctor, generate, plan, session

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with every verb attached; each verb sets ``run`` to its function."""
    parser = argparse.ArgumentParser(
        prog="ninfer-jax", description="Inference for Qwen3.5 hybrid models that plans what context to keep."
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and end")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (demo, generate, chat, session, doctor, plan, bench):
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 the verb itself reports failure, 2 bad input, 130 interrupted.

    A reader of our output that went away (`| head`) has what it wanted: that is no failure, but 0.

    Args:
        argv: arguments after the program name; ``sys.argv[1:]`` when None.
    """
    try:
        try:
            return _run(argv)
        finally:
            # Here, where it can be answered: at exit a pipe that nobody reads any more would be a complaint.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still held goes nowhere
        return EXIT_OK


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # without a word: whoever pressed the keys knows
    except BrokenPipeError:
        raise  # an OSError, but nobody's mistake
    except Exception as failure:
        code = exit_code_of(failure)
        if code is None:
            raise
        print(f"ninfer-jax {args.verb}: {one_line(failure)}", file=sys.stderr)
        return code


def exit_code_of(failure: Exception) -> int | None:
    """Returns 2 for the caller's mistakes, 1 for an engine that could not go on, None for a defect.

    A defect keeps its traceback: a message without one would hide where to look.
    """
    from ninfer_jax.errors import EngineClosedError, NinferError, RequestError, RequestErrorKind
    from ninfer_jax.model.errors import CheckpointError

    if isinstance(failure, EngineClosedError):
        return EXIT_FAILED
    if isinstance(failure, RequestError):
        return EXIT_USAGE if failure.kind is RequestErrorKind.CONTEXT_LENGTH_EXCEEDED else EXIT_FAILED
    return EXIT_USAGE if isinstance(failure, NinferError | CheckpointError | OSError) else None


def one_line(failure: BaseException) -> str:
    """Returns the message on a single line, with the file name that an OSError carries."""
    if isinstance(failure, OSError) and failure.filename is not None:
        return f"{failure.filename}: {failure.strerror}"
    return " ".join(str(failure).split()) or type(failure).__name__


class _PrintVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
        from ninfer_jax import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
