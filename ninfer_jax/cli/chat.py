"""``ninfer-jax chat``: a conversation in the terminal, streamed as it is generated."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from ninfer_jax.cli.arguments import add_engine_arguments, add_sampling_arguments, open_engine, sampling_from
from ninfer_jax.errors import PromptError

HELP = (
    "commands: /reset forgets the conversation, /regenerate answers again, /quit ends (Ctrl-D too); "
    "Ctrl-C stops an answer, which stays as far as it got, and at the prompt it ends the chat"
)


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser("chat", help="talk to a model, streaming", description=HELP)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--thinking", action="store_true", help="let the template open a reasoning block")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads user turns from the terminal (or lines from a pipe) until it ends."""
    sampling = sampling_from(args)
    interactive = sys.stdin.isatty()
    opening = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages: list[dict[str, Any]] = list(opening)
    with open_engine(args) as engine:
        if interactive:
            print(HELP)
        while (line := read_turn(interactive)) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            if line == "/regenerate":
                if not messages or messages[-1]["role"] != "assistant":
                    print("nothing to regenerate yet", file=sys.stderr)
                    continue
                messages.pop()
            elif line.startswith("/"):
                print(f"unknown command {line}; {HELP}", file=sys.stderr)
                continue
            elif line:
                messages.append({"role": "user", "content": line})
            else:
                continue
            text = answer(engine, messages, sampling, args.thinking, is_stoppable=interactive)
            if text is None:
                messages.pop()
                print("stopped before the first word: this turn is forgotten", file=sys.stderr)
            else:
                messages.append({"role": "assistant", "content": text})
    return 0


def read_turn(interactive: bool) -> str | None:
    """Returns the next line without its end, or None when the input is over."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not {error.encoding} text: {error.reason}") from error


def answer(
    engine: Any, messages: list[dict[str, Any]], sampling: Any, thinking: bool, *, is_stoppable: bool
) -> str | None:
    """Streams one answer to stdout and returns its content without the reasoning.

    Args:
        engine: a started engine.
        messages: the conversation, a user's turn last.
        sampling: of the answer.
        thinking: whether the template may open a reasoning block.
        is_stoppable: whether Ctrl-C ends this answer only. Then it is cancelled, and what it said stays part
            of the conversation; None if that is nothing.
    """
    from ninfer_jax.results import TextDelta

    pieces: list[str] = []
    was_stopped = False
    try:
        with closing(engine.stream(messages, sampling=sampling, enable_thinking=thinking)) as events:
            for event in events:
                if isinstance(event, TextDelta):
                    print(event.text, end="", flush=True)
                    if event.channel == "content":
                        pieces.append(event.text)
    except KeyboardInterrupt:
        if not is_stoppable:
            raise
        was_stopped = True
    print()
    return None if was_stopped and not pieces else "".join(pieces)
