"""Turns what a caller passed into a job: prompt identity, effective limits, sampling numbers, an open answer.

Owns the limits that need both sides at once (prompt against context, max_tokens against what is left of it).
Runs in the caller's thread and changes nothing: frontends and options are immutable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.prompts import Messages, Prompt, is_messages, is_token_ids
from ninfer_jax.request import HintArguments, RequestHints, check_hint_names, make_request_hints
from ninfer_jax.sampling_params import SamplingParams, advice_for

if TYPE_CHECKING:
    from ninfer_jax.frontend.frontend import Frontend
    from ninfer_jax.frontend.output import OutputSession
    from ninfer_jax.identity import PreparedPrompt
    from ninfer_jax.options import ResolvedOptions


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt is rendered; every field but the last belongs to messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    enable_thinking: bool | None = None
    template_kwargs: Mapping[str, Any] | None = None
    anchor_prompt_end: bool = False  # raw token prompts only (N-7)


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """Everything a request needs but its number, its deadlines and its place."""

    prepared: PreparedPrompt
    hints: RequestHints
    work: RequestWork
    output: OutputSession
    wants_logprobs: bool


def prepare_request(
    frontend: Frontend,
    options: ResolvedOptions,
    prompt: Prompt,
    *,
    sampling: SamplingParams | None,
    prompt_options: PromptOptions,
    hints: HintArguments,
    default_seed: int,
) -> PreparedRequest:
    """Returns the prepared request.

    Args:
        frontend: of the engine's checkpoint.
        options: of the engine.
        prompt: text, token ids, or messages.
        sampling: None takes every default of the checkpoint.
        prompt_options: how to render it.
        hints: arguments of ``make_request_hints``.
        default_seed: uint32, used where ``sampling`` names no seed.
    Raises:
        PromptError: if the prompt cannot be represented.
        OptionError: if a parameter or hint is out of range.
        RequestError: CONTEXT_LENGTH_EXCEEDED if not even one answer token would fit behind the prompt.
    """
    _check_arguments(hints)
    checked_hints = make_request_hints(
        cache_enabled=options.cache.enabled,
        max_long_anchors=options.cache.max_long_anchors_per_continuation,
        **hints,
    )
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise OptionError(f"sampling: got {type(sampling).__name__}, expected SamplingParams or None")
    params = (sampling or SamplingParams()).resolved(
        frontend.generation_defaults, vocab_size=frontend.vocab_size
    )
    prepared = prepare_prompt(frontend, prompt, prompt_options, max_tokens=options.max_context - 1)
    room = options.max_context - prepared.identity.num_tokens
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    output = frontend.open_output(
        prepared,
        max_tokens=max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=min(params.min_tokens, max_tokens),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    return PreparedRequest(
        prepared=prepared,
        hints=checked_hints,
        work=RequestWork(
            identity=prepared.identity,
            max_output_tokens=max_tokens,
            sampling=params.lane(eos_token_ids=frontend.eos_token_ids, default_seed=default_seed),
        ),
        output=output,
        wants_logprobs=params.logprobs is not None,
    )


def _check_arguments(hints: HintArguments) -> None:
    """Names the right place of an argument that stands among the hints but belongs elsewhere."""
    for name in sorted(hints):
        if (advice := advice_for(name)) is not None:
            raise OptionError(f"unknown argument {name}; {advice}")
        if name == "timeout_s" or name in PromptOptions.__dataclass_fields__:
            raise OptionError(f"{name} is not an argument of this call; submit(...).result() takes it")
    check_hint_names(hints)


def prepare_prompt(
    frontend: Frontend, prompt: Prompt, how: PromptOptions, *, max_tokens: int
) -> PreparedPrompt:
    """Returns the identity and boundaries of one prompt of any kind.

    Raises:
        PromptError: if it is of no known kind, or cannot be represented.
        OptionError: if an option belongs to another kind.
        RequestError: CONTEXT_LENGTH_EXCEEDED if it has more than `max_tokens`.
    """
    if how.anchor_prompt_end and not is_token_ids(prompt):
        kind = "messages" if is_messages(prompt) else f"a prompt of {type(prompt).__name__}"
        raise OptionError(f"anchor_prompt_end belongs to prompts of token ids, got {kind}")
    if is_messages(prompt):
        return frontend.prepare_messages(
            cast(Messages, prompt),
            tools=how.tools,
            enable_thinking=how.enable_thinking,
            template_kwargs=how.template_kwargs,
            max_tokens=max_tokens,
        )
    for name in ("tools", "enable_thinking", "template_kwargs"):
        if getattr(how, name) is not None:
            raise OptionError(f"{name} belongs to messages, got a prompt of {type(prompt).__name__}")
    if isinstance(prompt, str):
        return frontend.prepare_text(prompt, max_tokens=max_tokens)
    if is_token_ids(prompt):
        return frontend.prepare_tokens(
            cast("Sequence[int]", prompt), anchor_prompt_end=how.anchor_prompt_end, max_tokens=max_tokens
        )
    if isinstance(prompt, int | float):
        raise PromptError(
            f"prompt: got {type(prompt).__name__} {prompt}, expected text, token ids or messages; a list of "
            "token ids may hold integers only"
        )
    size = f" of length {len(prompt)}" if isinstance(prompt, Sequence) else ""
    raise PromptError(
        f"prompt: got {type(prompt).__name__}{size}, expected text, token ids, or messages with role and "
        "content"
    )
