"""What a prompt *is* for exact reuse: tokens, types, positions, media, mode and rewrite frontiers (C-6, C-7).

Owns the values and the exact comparison up to a frontier. It owns no text, no template and no cache: the
frontend builds these values, the program compares them, and nobody changes them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

TEXT_MODE = "text"
"""Mode of every prompt without media; where its tokens came from does not change the state they leave."""


class TokenType(enum.IntEnum):
    """How the model turns one token into an input vector."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2


class Evidence(enum.Flag):
    """Why somebody believes that a boundary is worth publishing (E-1)."""

    EXPLICIT_BOUNDARY = 1
    REQUESTED_AUTOMATIC = 2
    DEFAULT_AUTOMATIC = 4
    ENGINE_STRUCTURAL = 8
    ENGINE_OBSERVED = 16


class BoundaryKind(enum.Enum):
    """What ends at a boundary."""

    TOOLS = "tools"  # every tool description, before any other instruction (N-4)
    LEADING = "leading"  # the system and developer messages that open the conversation (N-4)
    MESSAGE = "message"  # one message of the conversation (N-6)


@dataclass(frozen=True, slots=True)
class Boundary:
    """A content border that falls exactly between two tokens.

    ``frontier_tokens`` tokens render the tools and the first ``message_count`` messages, and nothing else.
    """

    frontier_tokens: int
    message_count: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """One image or video in the prompt: the tokens [start_tokens, end_tokens) and what was in it."""

    start_tokens: int
    end_tokens: int
    token_type: TokenType
    digest: bytes


@dataclass(frozen=True, eq=False, slots=True)
class PromptIdentity:
    """Everything that decides the state and the KV a prompt leaves behind. Compare with `equal_up_to`.

    Build with `make_identity`, so that the arrays are read-only. ``S`` is the number of tokens.
    """

    tokens: np.ndarray  # int32[S]
    token_types: np.ndarray  # int8[S], values of TokenType
    positions: np.ndarray  # int32[3, S], temporal, row and column axis of M-RoPE
    rope_delta: int  # position of the next text token minus S
    media: tuple[MediaSpan, ...]
    mode: str
    rewrite_execution_frontiers: tuple[int, ...]  # ascending; a rebuild splits its prefill there (C-7)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, S."""
        return int(self.tokens.shape[0])


@dataclass(frozen=True, eq=False, slots=True)
class PreparedPrompt:
    """One request's prompt, as the frontend hands it to the engine."""

    identity: PromptIdentity
    boundaries: tuple[Boundary, ...]  # ascending by frontier
    generation_opener_frontier: int | None  # before the words that make the model answer (ResponseReplay)
    turn_closure_frontier: int | None = None  # behind the last user query, before all it led to (TurnClosure)
    starts_in_reasoning: bool = False  # the template ended the prompt inside an open thinking block
    from_messages: bool = False  # rendered by the chat template, so the answer has channels
    prompt_end_anchor: int | None = None  # N-7: raw prompts may offer an anchor one token before their end
    text: str | None = None  # the rendered text, to explain; not part of the identity


def make_identity(
    tokens: Sequence[int] | np.ndarray,
    *,
    rewrite_execution_frontiers: Sequence[int] = (),
    mode: str = TEXT_MODE,
) -> PromptIdentity:
    """Returns the identity of a prompt of plain text tokens at positions 0, 1, 2, ...

    Args:
        tokens: int[S], token ids.
        rewrite_execution_frontiers: token frontiers in 1..S-1, any order, duplicates allowed.
        mode: template/runtime mode; prompts of different modes never share state.
    """
    ids = np.array(tokens, dtype=np.int32)  # a copy: the caller's array stays the caller's
    (count,) = ids.shape
    positions = np.broadcast_to(np.arange(count, dtype=np.int32), (3, count)).copy()
    types = np.zeros(count, np.int8)
    for array in (ids, types, positions):
        array.setflags(write=False)
    frontiers = tuple(sorted({int(f) for f in rewrite_execution_frontiers if 0 < f < count}))
    return PromptIdentity(ids, types, positions, 0, (), mode, frontiers)


def extend_identity(identity: PromptIdentity, tokens: Sequence[int] | np.ndarray) -> PromptIdentity:
    """Returns the identity after more text tokens, such as the answer that was generated."""
    more = np.asarray(tokens, dtype=np.int32)
    start = identity.num_tokens + identity.rope_delta
    steps = np.broadcast_to(np.arange(start, start + len(more), dtype=np.int32), (3, len(more)))
    ids = np.concatenate([identity.tokens, more])
    types = np.concatenate([identity.token_types, np.zeros(len(more), np.int8)])
    positions = np.concatenate([identity.positions, steps], axis=1)
    for array in (ids, types, positions):
        array.setflags(write=False)
    return replace(identity, tokens=ids, token_types=types, positions=positions)


def prefix_of(identity: PromptIdentity, frontier_tokens: int) -> PromptIdentity:
    """Returns the identity of the first tokens alone; positions after it go on as they did in the whole.

    Raises:
        ValueError: if the frontier is outside, or cuts an image or video.
    """
    end = frontier_tokens
    if not 0 < end <= identity.num_tokens or cuts_media(identity, end):
        raise ValueError(f"no prefix of {end} tokens in a prompt of {identity.num_tokens}")
    if end == identity.num_tokens:
        return identity
    arrays = identity.tokens[:end], identity.token_types[:end], identity.positions[:, :end]
    tokens, types, positions = (np.array(array) for array in arrays)
    for array in (tokens, types, positions):
        array.setflags(write=False)
    return replace(
        identity,
        tokens=tokens,
        token_types=types,
        positions=positions,
        rope_delta=int(positions[:, -1].max()) + 1 - end,
        media=_media_before(identity, end),
        rewrite_execution_frontiers=_frontiers_before(identity, end),
    )


def cuts_media(identity: PromptIdentity, frontier_tokens: int) -> bool:
    """Returns whether a frontier falls strictly inside an image or video, where no state can be held."""
    return any(span.start_tokens < frontier_tokens < span.end_tokens for span in identity.media)


def equal_up_to(left: PromptIdentity, right: PromptIdentity, frontier_tokens: int) -> bool:
    """Returns whether two prompts are exactly the same prompt up to a frontier (C-1, C-6, C-7).

    The rope delta at a frontier follows from the positions before it, so comparing positions compares it too;
    the delta of the whole prompt would wrongly tell prompts apart that differ only in what comes after.
    """
    end = frontier_tokens
    if not 0 <= end <= min(left.num_tokens, right.num_tokens):
        return False
    if left.mode != right.mode or cuts_media(left, end) or cuts_media(right, end):
        return False
    return (
        bool(np.array_equal(left.tokens[:end], right.tokens[:end]))
        and bool(np.array_equal(left.token_types[:end], right.token_types[:end]))
        and bool(np.array_equal(left.positions[:, :end], right.positions[:, :end]))
        and _media_before(left, end) == _media_before(right, end)
        and _frontiers_before(left, end) == _frontiers_before(right, end)
    )


def common_frontier(left: PromptIdentity, right: PromptIdentity) -> int:
    """Returns the deepest frontier at which two prompts are still exactly equal; 0 when they never are."""
    if left.mode != right.mode:
        return 0
    end = min(left.num_tokens, right.num_tokens)
    same = (
        (left.tokens[:end] == right.tokens[:end])
        & (left.token_types[:end] == right.token_types[:end])
        & (left.positions[:, :end] == right.positions[:, :end]).all(axis=0)
    )
    if not same.all():
        end = int(np.argmin(same))
    # Walk down over the few places where media or rewrite frontiers disagree or would be cut.
    for ours, theirs in ((left, right), (right, left)):
        for span in ours.media:
            if span not in theirs.media and span.end_tokens > 0:
                end = min(end, span.start_tokens)
        for frontier in ours.rewrite_execution_frontiers:
            if frontier not in theirs.rewrite_execution_frontiers:
                end = min(end, frontier - 1)
    for span in left.media:
        if span.start_tokens < end < span.end_tokens:
            end = span.start_tokens
    return max(end, 0)


def _media_before(identity: PromptIdentity, frontier_tokens: int) -> tuple[MediaSpan, ...]:
    return tuple(span for span in identity.media if span.end_tokens <= frontier_tokens)


def _frontiers_before(identity: PromptIdentity, frontier_tokens: int) -> tuple[int, ...]:
    return tuple(f for f in identity.rewrite_execution_frontiers if f <= frontier_tokens)
