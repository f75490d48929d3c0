"""``ninfer-jax demo``: two conversations and a side request on a device too small for all of them.

Owns the script and the page it prints: what was planned for each turn, what was reused, and whether a cold
rerun gives the same bits. The restart at the end is `demo_restart`; everything else is public API.
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
from ninfer_jax.cli.demo_restart import stop_and_go_on

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine
    from ninfer_jax.results import GenerationResult, MaterializationRecord
    from ninfer_jax.sampling_params import SamplingParams

# What two people say to the embedded model, turn by turn.
CONVERSATIONS: dict[str, tuple[str, ...]] = {
    "Ana": ("Tell me a fairy tale.", "Go on.", "What happened then?"),
    "Ben": (
        "Hi! I'd like to cancel my reservation.",
        "I don't have my reservation ID with me.",
        "Thank you for your help.",
    ),
}
SIDE_ROUND = 1  # after this round somebody else asks for something long
SIDE_REQUEST = "Once upon a time there was a miller who had three sons. " * 8
INTRODUCTION = (
    "Two people talk to the embedded model in turn, and once somebody else comes in between. It has 3\n"
    "million parameters and read tales and booking dialogues for an hour: what follows is real generation,\n"
    "but expect manner, not sense. The device is too small for everybody: see what is kept, moved, dropped."
)
# One request at a time; 8 pages of 64 tokens and 4 state images on the device,
# 4 pages and 3 images on the host.
# One lane and one chunk size also mean few programs to compile before the first answer.
ENGINE_DEFAULTS = {
    "max_context": 512,
    "max_concurrency": 1,
    "prefill_chunk": 64,
    "device_state_slots": 3,
    "host_state_slots": 3,
    "host_kv_capacity_bytes": 4 * 2**17,
}
LINE_WIDTH = 100  # columns
SAMPLING_DEFAULTS = {
    "max_tokens": 90,
    "temperature": 0.4,
    "top_p": 0.95,
    "top_k": 40,
    "repetition_penalty": 1.1,
    "seed": 1,
}


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser("demo", help="two conversations on a device too small for both")
    parser.add_argument("--json", action="store_true", help="print the whole run as JSON")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Holds the conversations, prints plans and reuse, and checks every request against a cold rerun."""
    sampling = sampling_from(args, **SAMPLING_DEFAULTS)
    started = time.perf_counter()
    with open_engine(args, **ENGINE_DEFAULTS) as engine:
        from ninfer_jax.testing import check_cold_equals_warm

        startup_s = time.perf_counter() - started
        if not args.json:
            print(f"Engine ready in {startup_s:.1f} s.")
            print(INTRODUCTION if args.model == "demo" else "", end="\n\n", flush=True)
        turns: list[dict[str, Any]] = []
        started = time.perf_counter()
        show = None if args.json else print_turn
        try:
            check = str(check_cold_equals_warm(engine, lambda engine: hold(engine, sampling, turns, show)))
        except AssertionError as difference:
            check, is_equal = f"COLD DIFFERS: {difference}", False
        else:
            is_equal = True
        report = summarise(engine, turns, startup_s, time.perf_counter() - started)
        report["cold_equals_warm"] = {"is_equal": is_equal, "checked": check}
        memory = engine.describe()
        report["after_restart"] = restart = stop_and_go_on(
            engine, lambda: open_engine(args, **ENGINE_DEFAULTS), "Ana", opening_of(turns), sampling
        )
    if args.json:
        print_json(report)
    else:
        print(
            f"{report['prompt_tokens']} prompt tokens: {report['reused_tokens']} reused, "
            f"{report['computed_tokens']} computed. Answers: {report['completion_tokens']} tokens, all in "
            f"{report['talk_s']:.1f} s with the check."
        )
        print(textwrap.fill(check, LINE_WIDTH), end="\n\n")
        print(
            f"Ana's conversation was saved, the engine stopped; another was ready {restart['restart_s']} s "
            f"later.\nAna:   {restart['user']}\nmodel: {restart['answer']}\n"
            f"       [{restart['restored_checkpoints']} checkpoints restored; {restart['reused_tokens']} "
            f"prompt tokens reused, {restart['computed_tokens']} computed]",
            end="\n\n",
        )
        print(memory)
    return 0 if is_equal else 1


def hold(engine: Engine, sampling: SamplingParams, turns: list[dict[str, Any]], show: Any) -> None:
    """Appends every turn, in order; the plan of each is asked for before the turn runs."""
    histories: dict[str, list[dict[str, str]]] = {name: [] for name in CONVERSATIONS}

    def take(name: str, said: str, prompt: Any, **hints: Any) -> GenerationResult:
        plan = engine.plan(prompt, sampling=sampling, **hints).explain()
        result = engine.submit(prompt, sampling=sampling, **hints).result()
        turns.append(turn_of(name, said, result, plan_lines(plan)))
        if show is not None:
            show(turns[-1])
        return result

    for number in range(max(map(len, CONVERSATIONS.values()))):
        for name, script in CONVERSATIONS.items():
            histories[name].append({"role": "user", "content": script[number]})
            result = take(name, script[number], histories[name], session=name)
            histories[name].append({"role": "assistant", "content": result.text})
        if number == SIDE_ROUND:
            take("Guest", SIDE_REQUEST.strip(), SIDE_REQUEST)


def opening_of(turns: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Returns Ana's conversation up to her second message, as messages."""
    mine = [turn for turn in turns if turn["conversation"] == "Ana"][:2]
    messages = []
    for turn in mine:
        messages.append({"role": "user", "content": turn["user"]})
        messages.append({"role": "assistant", "content": turn["answer"]})
    return messages[:-1]


def plan_lines(explanation: str) -> list[str]:
    """Returns what a plan says about source, other owners and price; the table of stages is left out."""
    kept, is_kept = [], False
    for line in explanation.splitlines():
        if not line.startswith(" "):
            is_kept = line.split(maxsplit=1)[0] in ("source", "owner", "owners", "price")
        if is_kept and line.startswith(" "):
            kept[-1] += " " + line.strip()
        elif is_kept:
            kept.append(line)
    return kept


def turn_of(name: str, said: str, result: GenerationResult, plan: list[str]) -> dict[str, Any]:
    """Returns one exchange as plain values."""
    record = result.materialization
    assert record is not None, "an answered request was admitted"
    return {
        "conversation": name,
        "user": said,
        "answer": result.text.strip(),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "reused_tokens": record.reused_tokens,
        "computed_tokens": record.prefill_tokens,
        "source": record.source,
        "restored_bytes": record.restored_bytes,
        "offloaded_bytes": record.offloaded_bytes,
        "evicted_owners": record.evicted_owners,
        "plan": plan,
        "moves": moves_of(record),
    }


def moves_of(record: MaterializationRecord) -> str:
    """Returns what starting the request moved and dropped, in a few words."""
    moves = [
        f"{num_bytes / 1024:.0f} KiB {what}"
        for num_bytes, what in (
            (record.restored_bytes, "back from the host"),
            (record.offloaded_bytes, "to the host"),
        )
        if num_bytes
    ]
    if record.evicted_owners:
        moves.append(f"{record.evicted_owners} context{'s' * (record.evicted_owners > 1)} dropped")
    return ", ".join(moves) or "nothing moved"


def print_turn(turn: dict[str, Any]) -> None:
    """Prints one exchange for a person."""
    for speaker, text in ((turn["conversation"], turn["user"]), ("model", turn["answer"])):
        label = f"{speaker + ':':<7}"
        for line in text.splitlines() or [""]:
            print(textwrap.fill(line, LINE_WIDTH, initial_indent=label, subsequent_indent=" " * len(label)))
            label = " " * len(label)
    for line in turn["plan"]:
        print(
            textwrap.fill(line, LINE_WIDTH, initial_indent="     | ", subsequent_indent="     |           ")
        )
    counts = f"{turn['reused_tokens']} of {turn['prompt_tokens']} prompt tokens reused"
    print(f"       [{counts}, {turn['computed_tokens']} computed; {turn['moves']}]\n", flush=True)


def summarise(engine: Engine, turns: list[dict[str, Any]], startup_s: float, talk_s: float) -> dict[str, Any]:
    """Returns the whole run as plain values."""
    sums = {
        name: sum(turn[name] for turn in turns)
        for name in ("prompt_tokens", "completion_tokens", "reused_tokens", "computed_tokens")
    }
    return {
        "startup_s": round(startup_s, 3),
        "talk_s": round(talk_s, 3),
        "turns": turns,
        **sums,
        "stats": engine.stats(),
    }
