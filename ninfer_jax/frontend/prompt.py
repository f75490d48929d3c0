"""Messages, text or token ids to a `PreparedPrompt`.

Owns the step from text to token frontiers. A conversation is rendered whole and tokenised once: pieces
tokenised apart need not join to the same tokens (two line ends are one token). It validates no message and
reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from tokenizers import Encoding

from ninfer_jax.errors import PromptError, RequestError, RequestErrorKind
from ninfer_jax.frontend.boundaries import find_text_boundaries, replaceable_from
from ninfer_jax.frontend.channels import THINK_CLOSE_TEXT, THINK_OPEN_TEXT
from ninfer_jax.frontend.messages import Message, is_user_query
from ninfer_jax.frontend.template import ChatTemplate
from ninfer_jax.frontend.tokenizer import TextTokenizer, token_border
from ninfer_jax.identity import Boundary, BoundaryKind, PreparedPrompt, make_identity

# A shorter text is tokenised at once: that takes no longer than the bound's look through the vocabulary.
_BOUNDED_CHARS = 1 << 18


def prepare_conversation(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    vocab_size: int,
    options: Mapping[str, Any],
    now: datetime,
    max_tokens: int | None,
) -> PreparedPrompt:
    """Returns the prompt of a conversation, with its message borders as token frontiers.

    Args:
        messages: from `messages.normalise_messages`.
        tools: from `messages.normalise_tools`.
        options: variables for the template, such as ``enable_thinking``.
        now: the time that every rendering of this request sees.
        max_tokens: that the prompt may have, if it is limited.
    Raises:
        PromptError: if the template refuses, or a token lies outside the model's vocabulary.
        RequestError: if it has too many tokens, before its borders are looked for.
    """

    def render(some: Sequence[Message], *, with_tools: bool, open_answer: bool) -> str:
        return template.render(
            _known_roles(some, template),
            tools=tools if with_tools else None,
            add_generation_prompt=open_answer,
            options=options,
            now=now,
        )

    text = render(messages, with_tools=True, open_answer=True)
    encoding = fitting_encoding(text, tokenizer, max_tokens)
    tokens = checked_tokens(encoding.ids, vocab_size)
    history = render(messages, with_tools=True, open_answer=False)
    boundaries: list[Boundary] = []
    opener = None
    if text.startswith(history):
        opener = token_border(encoding, len(history))
        for found in find_text_boundaries(render, messages, history, has_tools=bool(tools)):
            frontier = token_border(encoding, found.offset_chars)
            if frontier:
                boundaries.append(Boundary(frontier, found.message_count, found.kind))
    ends = {b.message_count: b.frontier_tokens for b in boundaries if b.kind is BoundaryKind.MESSAGE}
    rewrites = [ends[count] for count in replaceable_from(messages) if count in ends]
    last_query = max((n + 1 for n, message in enumerate(messages) if is_user_query(message)), default=0)
    return PreparedPrompt(
        identity=make_identity(tokens, rewrite_execution_frontiers=rewrites),
        boundaries=tuple(boundaries),
        generation_opener_frontier=opener,
        turn_closure_frontier=ends.get(last_query),
        starts_in_reasoning=text.rfind(THINK_OPEN_TEXT) > max(text.rfind(THINK_CLOSE_TEXT), len(history) - 1),
        from_messages=True,
        text=text,
    )


def prepare_raw_text(
    text: str, *, tokenizer: TextTokenizer, vocab_size: int, max_tokens: int | None
) -> PreparedPrompt:
    """Returns the prompt of a text that is used as it is; special tokens spelled in it are those tokens.

    Raises:
        PromptError: if it is not text, is empty, or holds a token outside the model's vocabulary.
        RequestError: if it has too many tokens.
    """
    if not isinstance(text, str):
        raise PromptError(f"a text prompt must be a string, got {type(text).__name__}")
    tokens = checked_tokens(fitting_encoding(text, tokenizer, max_tokens).ids, vocab_size)
    return PreparedPrompt(
        identity=make_identity(tokens),
        boundaries=(),
        generation_opener_frontier=None,
        text=text,
    )


def prepare_raw_tokens(
    tokens: Sequence[int] | np.ndarray, *, vocab_size: int, anchor_prompt_end: bool, max_tokens: int | None
) -> PreparedPrompt:
    """Returns the prompt of token ids, which has no message structure (N-7).

    ``anchor_prompt_end`` offers an anchor one token before the end, so that repeating the prompt recomputes
    only its last token. It stays outside the identity: with and without it, the prompt is the same prompt.

    Raises:
        PromptError: if there is no token, or an id lies outside the model's vocabulary.
        RequestError: if there are too many.
    """
    ids = checked_tokens(tokens, vocab_size)
    check_fits(len(ids), max_tokens)
    anchor = len(ids) - 1 if anchor_prompt_end and len(ids) > 1 else None
    return PreparedPrompt(
        identity=make_identity(ids),
        boundaries=(),
        generation_opener_frontier=anchor,
        prompt_end_anchor=anchor,
    )


def fitting_encoding(text: str, tokenizer: TextTokenizer, max_tokens: int | None) -> Encoding:
    """Returns the tokens of a text; one that is far too long is refused without being tokenised.

    Raises:
        PromptError: if the text is no valid Unicode.
        RequestError: if there are more than `max_tokens`.
    """
    if max_tokens is not None and len(text) > max(_BOUNDED_CHARS, max_tokens):
        check_fits(tokenizer.least_tokens(text), max_tokens, "at least ")
    encoding = tokenizer.encode_with_offsets(text)
    check_fits(len(encoding), max_tokens)
    return encoding


def check_fits(num_tokens: int, max_tokens: int | None, qualifier: str = "") -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED if a prompt has more tokens than leave room for an answer.

    Args:
        num_tokens: of the prompt.
        max_tokens: that it may have, one less than the context; None is no limit.
        qualifier: stands before the number, where it is not exact.
    """
    if max_tokens is not None and num_tokens > max_tokens:
        raise RequestError(
            RequestErrorKind.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {qualifier}{num_tokens} tokens; with at least one answer token it must fit "
            f"max_context = {max_tokens + 1}: shorten it, or raise max_context",
        )


def checked_tokens(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns token ids as int64[S] once they are known to be rows of the model's embedding.

    Raises:
        PromptError: naming the first id that is not.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise PromptError(f"token ids must be a flat list of integers: {error}") from error
    if ids.size == 0:
        raise PromptError("the prompt has no tokens; give at least one")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise PromptError(f"token ids must be a flat list of integers, got {ids.dtype} of shape {ids.shape}")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise PromptError(f"token id {ids[bad[0]]} at index {bad[0]} is outside 0..{vocab_size - 1}")
    return ids.astype(np.int64)


def _known_roles(messages: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    """Messages with the developer role as system where the template has never heard of it."""
    if template.mentions_developer:
        return messages
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
