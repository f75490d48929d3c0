"""``ninfer-jax chat``: a conversation in the terminal, streamed as it is generated."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ninfer_jax.cli.arguments import add_engine_arguments, add_sampling_arguments, open_engine, sampling_from
from ninfer_jax.errors import PromptError

HELP = "commands: /reset forgets the conversation, /regenerate answers again, /quit ends (Ctrl-D too)"


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
            messages.append(
                {"role": "assistant", "content": answer(engine, messages, sampling, args.thinking)}
            )
    return 0


def read_turn(interactive: bool) -> str | None:
    """Returns the next line without its end, or None when the input is over."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not {error.encoding} text: {error.reason}") from error


def answer(engine: Any, messages: list[dict[str, Any]], sampling: Any, thinking: bool) -> str:
    """Streams one answer to stdout and returns its content without the reasoning."""
    from ninfer_jax.results import TextDelta

    pieces: list[str] = []
    for event in engine.stream(messages, sampling=sampling, enable_thinking=thinking):
        if isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
            if event.channel == "content":
                pieces.append(event.text)
    print()
    return "".join(pieces)
