"""``ninfer-jax demo``: two multi-turn conversations at once on the embedded model, then what they cost.

Owns the script of the conversations and the page it prints; everything else is the engine's public API.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from typing import TYPE_CHECKING, Any

from ninfer_jax.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    open_engine,
    print_json,
    sampling_from,
)

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine
    from ninfer_jax.results import GenerationResult
    from ninfer_jax.sampling_params import SamplingParams

# What two people say to the embedded model, turn by turn; both turns of a round run at once.
CONVERSATIONS: dict[str, tuple[str, ...]] = {
    "Ana": ("Tell me a fairy tale.", "Go on.", "What happened then?"),
    "Ben": (
        "Hi! I'd like to cancel my reservation.",
        "I don't have my reservation ID with me.",
        "Thank you for your help.",
    ),
}
INTRODUCTION = (
    "Two people talk to the embedded model at once. It has 3 million parameters and read tales and booking\n"
    "dialogues for an hour: what follows is real generation, but expect manner, not sense."
)
LINE_WIDTH = 100  # columns
DEFAULTS = {
    "max_tokens": 90,
    "temperature": 0.4,
    "top_p": 0.95,
    "top_k": 40,
    "repetition_penalty": 1.1,
    "seed": 1,
}


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser("demo", help="two interleaved conversations on the embedded model")
    parser.add_argument("--json", action="store_true", help="print the whole run as JSON")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Holds both conversations, a round at a time, and prints texts, speed and the memory table."""
    sampling = sampling_from(args, **DEFAULTS)
    started = time.perf_counter()
    # Two speakers and one chunk size: every further one is a program to compile before the first answer.
    with open_engine(args, max_context=2048, max_concurrency=2, prefill_chunk=64) as engine:
        startup_s = time.perf_counter() - started
        if not args.json:
            print(f"Engine ready in {startup_s:.1f} s.")
            print(INTRODUCTION if args.model == "demo" else "", end="\n\n", flush=True)
        talk_started = time.perf_counter()
        turns = hold(engine, sampling, None if args.json else print_turn)
        talk_s = time.perf_counter() - talk_started
        report = summarise(engine, turns, startup_s, talk_s)
        memory = engine.describe()
    if args.json:
        print_json(report)
    else:
        print(
            f"{report['completion_tokens']} tokens answered and {report['prompt_tokens']} prompt tokens read "
            f"in {talk_s:.1f} s: {report['completion_tokens_per_s']:.0f} answer tokens/s over both.\n"
        )
        print(memory)
    return 0


def hold(engine: Engine, sampling: SamplingParams, show: Any) -> list[dict[str, Any]]:
    """Returns every turn in order; the turns of one round are submitted together and decode in one batch."""
    histories: dict[str, list[dict[str, str]]] = {name: [] for name in CONVERSATIONS}
    turns: list[dict[str, Any]] = []
    for number in range(max(map(len, CONVERSATIONS.values()))):
        handles = {}
        for name, script in CONVERSATIONS.items():
            histories[name].append({"role": "user", "content": script[number]})
            handles[name] = engine.submit(histories[name], sampling=sampling, session=name)
        for name, handle in handles.items():
            result: GenerationResult = handle.result()
            histories[name].append({"role": "assistant", "content": result.text})
            turn = {
                "conversation": name,
                "user": CONVERSATIONS[name][number],
                "answer": result.text.strip(),
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.usage.prompt_tokens,
                "completion_tokens": result.usage.completion_tokens,
                "cached_tokens": result.usage.cached_tokens,
            }
            turns.append(turn)
            if show is not None:
                show(turn)
    return turns


def print_turn(turn: dict[str, Any]) -> None:
    """Prints one exchange for a person."""
    for speaker, text in ((turn["conversation"], turn["user"]), ("model", turn["answer"])):
        label = f"{speaker + ':':<7}"
        for line in text.splitlines() or [""]:
            print(textwrap.fill(line, LINE_WIDTH, initial_indent=label, subsequent_indent=" " * len(label)))
            label = " " * len(label)
    counts = f"{turn['prompt_tokens']} prompt + {turn['completion_tokens']} answer tokens"
    print(f"       [{counts}, {turn['finish_reason']}]\n", flush=True)


def summarise(engine: Engine, turns: list[dict[str, Any]], startup_s: float, talk_s: float) -> dict[str, Any]:
    """Returns the whole run as plain values."""
    completion_tokens = sum(turn["completion_tokens"] for turn in turns)
    return {
        "startup_s": round(startup_s, 3),
        "talk_s": round(talk_s, 3),
        "turns": turns,
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in turns),
        "completion_tokens": completion_tokens,
        "completion_tokens_per_s": round(completion_tokens / talk_s, 1),
        "stats": engine.stats(),
    }
