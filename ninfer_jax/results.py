"""What a caller gets back: events while an answer grows, and the whole answer with its accounting.

Owns plain frozen values only. How they travel between threads is ``handle``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ninfer_jax.frontend.channels import Channel
from ninfer_jax.request import RequestId
from ninfer_jax.reuse import MissReason, SourceKind

# stop: an end token or a stop string; length: max_tokens or the context is full; timeout: the request's own
# deadline passed while it was running. The answer so far is kept in every case.
FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The drawn token's log-probability and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class MaterializationRecord:
    """Where one request started from, what that took, and why it reused no more.

    Attributes:
        prefill_tokens: prompt tokens that had to be computed.
        restored_bytes: brought from Host to Device for it; offloaded_bytes: pushed to Host to make room.
        degraded_owners: other contexts that lost something for it, evicted ones included.
        plan_id: names the plan in logs and traces.
        price_ns: predicted cost by cause: prefill, pressure, restore, copy, future loss (O-9).
        stop_reason: why planning stopped (G-13).
        targets: end states looked at.
        is_fallback: everything unprotected had to go (G-4).
        planning_ns: time spent on planning it.
    """

    source: SourceKind
    reused_tokens: int
    prefill_tokens: int
    miss_reason: MissReason | None
    restored_bytes: int = 0
    offloaded_bytes: int = 0
    degraded_owners: int = 0
    evicted_owners: int = 0
    plan_id: str = ""
    price_ns: Mapping[str, int] = field(default_factory=dict)
    stop_reason: str = "no_pressure"
    targets: int = 0
    is_fallback: bool = False
    planning_ns: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; ``cached_tokens`` are verified reused prompt tokens (OBS-02)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and answer together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request in seconds; a phase that was never reached lasts 0."""

    queue_s: float  # submission to admission
    prefill_s: float  # admission to the first token
    decode_s: float  # first token to the end
    total_s: float

    @property
    def first_token_s(self) -> float:
        """Submission to the first token."""
        return self.queue_s + self.prefill_s


@dataclass(frozen=True)
class GenerationResult:
    """One finished answer. ``text`` is the content channel; ``reasoning`` what stood inside thinking blocks.

    ``materialization`` is None for a request that ended before it was admitted. ``stop_detail`` names the
    stop string or the token id that ended the answer. ``logprobs`` is aligned with ``token_ids`` where they
    were asked for, else None.
    """

    request_id: RequestId
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_detail: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None
    materialization: MaterializationRecord | None
    timings: Timings


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """The request became Active; published exactly once, before any delta."""

    request_id: RequestId
    prompt_tokens: int
    reused_tokens: int
    source: SourceKind


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Committed output. Text may lag behind its tokens: a character is never split, a possible stop is held.

    A step that yields tokens but no text yet is a delta with empty ``text``, so that token streams miss
    nothing.
    """

    text: str
    channel: Channel
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every answer that did not fail."""

    result: GenerationResult


Event: TypeAlias = GenerationStart | TextDelta | Finished
