"""Arguments that several verbs share, and their translation into options, sampling and messages.

Owns no validation of values: the engine's own edge does that, so that API and command line say the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ninfer_jax.errors import OptionError

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine
    from ninfer_jax.sampling_params import SamplingParams


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the checkpoint and the engine's capacities."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", default="demo", metavar="DIR", help="a Hugging Face directory, or 'demo' (default)"
    )
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPU, bfloat16 on GPU"
    )
    group.add_argument("--dummy", action="store_true", help="random weights: only config.json is read")
    group.add_argument(
        "--max-context",
        type=int,
        metavar="TOKENS",
        help="prompt plus answer of one request (default: 8192, or the model's own limit; demo: 512)",
    )
    group.add_argument(
        "--kv-capacity",
        metavar="TOKENS",
        help="KV tokens over all requests, or 'auto': from free memory (default)",
    )
    group.add_argument(
        "--concurrency", type=int, metavar="C", help="requests that run at once, 1..8 (default: 4; demo: 1)"
    )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="TOKENS",
        help="prompt tokens per prefill step (default: 1024; demo: 64)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the usual sampling parameters; what is not given follows the checkpoint's generation_config."""
    group = parser.add_argument_group(
        "sampling",
        "what is not given here follows the verb (demo) or the checkpoint's generation_config.json",
    )
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="answer tokens (default: what the context allows)"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy, 1 the model's own odds")
    group.add_argument(
        "--top-p", type=float, metavar="X", help="draw from the likeliest that sum to X; 1 is off"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest; 0 is off")
    group.add_argument("--min-p", type=float, metavar="X", help="at least X times the likeliest; 0 is off")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="-2 to 2, on what the answer used")
    group.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="-2 to 2, for each use in the answer"
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 0, on prompt and answer; 1 is off"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same answer")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def engine_options(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """Returns the engine's options: what was given on the command line over the verb's own ``defaults``."""
    named = {
        "dtype": args.dtype,
        "max_context": args.max_context,
        "kv_capacity": parse_kv_capacity(args.kv_capacity),
        "max_concurrency": args.concurrency,
        "prefill_chunk": args.prefill_chunk,
        "load_format": "dummy" if args.dummy else None,
    }
    return {**defaults, **{name: value for name, value in named.items() if value is not None}}


def open_engine(args: argparse.Namespace, **defaults: Any) -> Engine:
    """Returns a started engine for the shared arguments; says on a terminal why that takes a while."""
    from ninfer_jax.engine import Engine, plan_memory

    options = engine_options(args, **defaults)
    if sys.stderr.isatty():
        plan_memory(args.model, **options)  # a mistake is refused before anything is announced
        print(
            "Starting: the first start compiles for this machine, which can take minutes ...", file=sys.stderr
        )
    return Engine.from_pretrained(args.model, **options)


def parse_kv_capacity(text: str | None) -> int | str | None:
    """Returns tokens as an int, ``"auto"`` as it is, None when the option was not given."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise OptionError(f"--kv-capacity: got {text!r}, expected a number of tokens or 'auto'")
    return int(text)


def sampling_from(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Returns SamplingParams with what was given on the command line over the verb's own defaults."""
    from ninfer_jax import SamplingParams

    names = (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "seed",
    )  # fmt: skip
    values = dict(defaults)
    values.update({name: getattr(args, name) for name in names if getattr(args, name) is not None})
    if args.stop:
        values["stop"] = tuple(args.stop)
    sampling = SamplingParams(**values)
    sampling.validate()  # here, so that a mistake is answered before a model is loaded
    return sampling


def print_json(report: Any) -> None:
    """Prints one JSON document on stdout."""
    print(json.dumps(report, indent=2, ensure_ascii=False))
