"""``ninfer-jax session``: what saved sessions hold, whether they are whole, and going on with one.

Owns the verbs' arguments and output. Files and engines do the work.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_jax.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    open_engine,
    print_json,
    sampling_from,
)
from ninfer_jax.errors import OptionError

if TYPE_CHECKING:
    from ninfer_jax.engine_sessions import SessionFacts


def add_parser(verbs: Any) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser(
        "session", help="list, inspect and verify saved sessions; save one, or go on with one"
    )
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, text, argument in (
        ("list", "what a directory holds", "DIR"),
        ("inspect", "one saved session, without reading its arrays", "PATH"),
        ("verify", "the same after checking every byte", "PATH"),
        ("erase", "remove one saved session", "PATH"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("path", metavar=argument)
        kind.add_argument("--json", action="store_true", help="print one JSON document")
        kind.set_defaults(run=_RUN[name])
    for name, text in (
        ("save", "answer a message and save the conversation"),
        ("restore", "restore a conversation and go on with it"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("path", metavar="PATH")
        kind.add_argument(
            "--message",
            action="append",
            required=True,
            metavar="TEXT",
            help="turns in order, user first; repeat it for the whole conversation",
        )
        kind.add_argument("--session", default="default", metavar="KEY", help="the session's key")
        kind.add_argument("--json", action="store_true", help="print one JSON document")
        add_engine_arguments(kind)
        add_sampling_arguments(kind)
        kind.set_defaults(run=_RUN[name])


def _list(args: argparse.Namespace) -> int:
    from ninfer_jax.engine_sessions import list_saved_sessions

    found = list_saved_sessions(args.path)
    if args.json:
        print_json([_plain(facts) for facts in found])
        return 0
    for facts in found:
        print(_line(facts))
    if not found:
        print(f"no saved session in {args.path}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from ninfer_jax.engine_sessions import inspect_session

    return _show(args, inspect_session(args.path))


def _verify(args: argparse.Namespace) -> int:
    from ninfer_jax.engine_sessions import verify_session

    return _show(args, verify_session(args.path), "every byte is what was saved")


def _erase(args: argparse.Namespace) -> int:
    from ninfer_jax.session_files import erase_session_files

    erase_session_files(args.path)
    if args.json:
        print_json({"erased": str(args.path)})
    return 0


def _save(args: argparse.Namespace) -> int:
    from ninfer_jax.session_files import check_session_folder

    # everything that can be refused is, before an engine is started
    sampling, conversation = sampling_from(args), _conversation(args.message)
    check_session_folder(Path(args.path))
    with open_engine(args) as engine:
        answer = engine.chat(conversation, session=args.session, sampling=sampling)
        if not args.json:
            print(answer.text, flush=True)
        folder = engine.save_session(args.session, args.path)
    if args.json:
        print_json({"text": answer.text, "saved": str(folder), "tokens": answer.usage.total_tokens})
    else:
        print(f"\nsaved in {folder}")
    return 0


def _restore(args: argparse.Namespace) -> int:
    from ninfer_jax.engine_sessions import inspect_session

    sampling, conversation = sampling_from(args), _conversation(args.message)
    inspect_session(args.path)
    with open_engine(args) as engine:
        restored = engine.restore_session(args.path, session=args.session)
        answer = engine.chat(conversation, session=args.session, sampling=sampling)
    usage = answer.usage
    if args.json:
        print_json(
            {
                "text": answer.text,
                "restored": asdict(restored),
                "prompt_tokens": usage.prompt_tokens,
                "reused_tokens": usage.cached_tokens,
            }
        )
    else:
        print(f"{answer.text}\n\nrestored {restored.tokens} tokens and {len(restored.kept)} checkpoints")
        print(f"of the prompt's {usage.prompt_tokens} tokens {usage.cached_tokens} were reused")
    return 0


_RUN = {
    "list": _list,
    "inspect": _inspect,
    "verify": _verify,
    "erase": _erase,
    "save": _save,
    "restore": _restore,
}


def _conversation(texts: list[str]) -> list[dict[str, str]]:
    if len(texts) % 2 == 0:
        raise OptionError(f"--message: got {len(texts)} turns; the last one must be the user's")
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]


def _show(args: argparse.Namespace, facts: SessionFacts, remark: str = "") -> int:
    if args.json:
        print_json(_plain(facts))
        return 0
    print(_line(facts))
    for kind, frontier in facts.checkpoints:
        print(f"  {frontier:>8} tokens  {kind.replace('_', ' ')}")
    if remark:
        print(remark)
    return 0


def _plain(facts: SessionFacts) -> dict[str, Any]:
    return {**asdict(facts), "path": str(facts.path)}


def _line(facts: SessionFacts) -> str:
    name = "without a key" if facts.session is None else repr(facts.session)
    return (
        f"{facts.path}: session {name}, {facts.tokens} tokens, {len(facts.checkpoints)} checkpoints, "
        f"{facts.num_bytes:,} bytes"
    )
