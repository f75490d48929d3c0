"""``ninfer-jax plan FILE``: explains a saved planning decision, recomputes it, or draws it.

Owns the verb and its exit codes. The file format and the explanation are `planner.outcome`'s.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ninfer_jax.cli.arguments import print_json

MAX_SHOWN = 10


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser("plan", help="explain a saved planning decision")
    parser.add_argument("file", type=Path, metavar="FILE", help="written by PlanOutcome.to_json()")
    parser.add_argument(
        "--verify", action="store_true", help="plan again and compare bit for bit; exit code 1 if it differs"
    )
    parser.add_argument("--json", action="store_true", help="print the decision as JSON")
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw the stages against capacity")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the explanation; 1 when `--verify` finds another decision."""
    from ninfer_jax.errors import OptionError
    from ninfer_jax.planner.codec import encode
    from ninfer_jax.planner.outcome import differences, from_json, replay

    text = args.file.read_bytes()
    try:
        outcome = from_json(text)
        found = differences(outcome, replay(outcome)) if args.verify else ()
    except ValueError as damaged:
        raise OptionError(f"{args.file}: {damaged}") from damaged
    if args.png is not None:
        from ninfer_jax.cli.plan_picture import draw

        draw(outcome, args.png)
    if args.json:
        report = {"decision": encode(outcome.decision)}
        print_json(report | ({"verified": not found, "differences": list(found)} if args.verify else {}))
        return 1 if found else 0
    print(outcome.explain())
    if args.png is not None:
        print(f"drawn     {args.png}")
    if args.verify and not found:
        print("verified  planning again gives the same decision, bit for bit")
    for path in found[:MAX_SHOWN]:
        print(f"DIFFERS   {path}")
    if len(found) > MAX_SHOWN:
        print(f"          and {len(found) - MAX_SHOWN} more")
    return 1 if found else 0
