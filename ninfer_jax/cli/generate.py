"""``ninfer-jax generate``: completes prompts given as text, as a chat turn, or as token ids."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ninfer_jax.checks import checked_seconds
from ninfer_jax.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    open_engine,
    print_json,
    sampling_from,
)
from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.prompts import Prompt


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser("generate", help="complete one or more prompts")
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text; '-' or nothing reads one from stdin"
    )
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a user message through the template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_argument(
        "--token-ids", action="append", metavar="IDS", help="a prompt as ids: 12,7,99; may be repeated"
    )
    parser.add_argument("--tools", metavar="FILE", help="JSON list of the tools that --chat may call")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="let --chat's template open a reasoning block, or close it (default: as the template has it)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="of each prompt; running out, an answer ends as far as it got, and one that never began fails",
    )
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs all prompts as one batch and prints the answers in their order."""
    prompts = read_prompts(args)
    sampling = sampling_from(args)
    tools = None if args.tools is None else read_tools(args.tools)
    with open_engine(args) as engine:
        asked: list[Prompt] = [
            chat_messages(args.system, prompt) if args.chat and isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        results = engine.generate(
            asked, sampling, tools=tools, enable_thinking=args.thinking, timeout_s=args.timeout
        )
    if args.json:
        print_json([describe_result(result) for result in results])
    else:
        for number, result in enumerate(results):
            if len(results) > 1:
                print(f"--- {number + 1} of {len(results)}")
            print(result.text if result.text else " ".join(map(str, result.token_ids)))
    return 0


def read_prompts(args: argparse.Namespace) -> list[str | list[int]]:
    """Returns the prompts of the command line; stdin stands in for '-' or for none at all."""
    prompts: list[str | list[int]] = [parse_token_ids(ids) for ids in args.token_ids or ()]
    texts = args.prompts or ([] if prompts else ["-"])
    prompts.extend(read_stdin() if text == "-" else text for text in texts)
    if args.chat and any(not isinstance(prompt, str) for prompt in prompts):
        raise OptionError("--token-ids cannot be combined with --chat: a template needs text")
    if args.system is not None and not args.chat:
        raise OptionError("--system needs --chat: a raw prompt has no messages")
    for name in ("tools", "thinking"):
        if getattr(args, name) is not None and not args.chat:
            raise OptionError(f"--{name} needs --chat: only a template knows what to make of it")
    if args.timeout is not None:
        checked_seconds("--timeout", args.timeout)  # here, so that a mistake is answered before a model loads
    return prompts


def read_tools(path: str) -> list[Any]:
    """Returns the tool descriptions of a JSON file; the engine checks each of them.

    Raises:
        OptionError: if the file holds no JSON list.
    """
    try:
        with open(path, encoding="utf-8") as file:
            tools = json.load(file)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--tools: {path} is not valid JSON: {error}") from error
    if not isinstance(tools, list):
        raise OptionError(f"--tools: {path} holds {type(tools).__name__}, expected a list of tool objects")
    return tools


def read_stdin() -> str:
    """Returns all of standard input without the line ends behind it."""
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not {error.encoding} text: {error.reason}") from error


def parse_token_ids(text: str) -> list[int]:
    """Returns the ids of '12,7,99' or '12 7 99'."""
    pieces = text.replace(",", " ").split()
    if not pieces or not all(piece.isdecimal() for piece in pieces):
        raise OptionError(f"--token-ids: got {text!r}, expected non-negative integers such as 12,7,99")
    return [int(piece) for piece in pieces]


def chat_messages(system: str | None, prompt: str) -> list[dict[str, Any]]:
    """Returns one user turn, behind the system message when there is one."""
    head = [{"role": "system", "content": system}] if system is not None else []
    return [*head, {"role": "user", "content": prompt}]


def describe_result(result: Any) -> dict[str, Any]:
    """Returns the answer as plain JSON values."""
    return {
        "text": result.text,
        "reasoning": result.reasoning,
        "token_ids": [int(token) for token in result.token_ids],
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "cached_tokens": result.usage.cached_tokens,
        },
    }
