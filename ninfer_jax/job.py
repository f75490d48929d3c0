"""The worker's own record of one request, and the result it becomes.

Owns what changes while a request lives. Mutable, and touched by the worker alone (Q-2); everything that
leaves it is a frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ninfer_jax.handle import Response
from ninfer_jax.request import Request, RequestId, RequestState, SequenceHandle, checked_transition
from ninfer_jax.results import (
    FinishReason,
    GenerationResult,
    MaterializationRecord,
    Timings,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from ninfer_jax.context_cache.request_facts import RequestFacts
    from ninfer_jax.frontend.output import Delta, OutputSession
    from ninfer_jax.program.admission import RequestWork

NS_PER_S = 1_000_000_000


@dataclass(eq=False, slots=True)
class Job:
    """One request from submission to its end."""

    request: Request
    work: RequestWork
    facts: RequestFacts
    output: OutputSession  # committed: stop matching and detokenisation up to the last committed token
    response: Response
    wants_logprobs: bool
    state: RequestState = RequestState.WAITING
    sequence: SequenceHandle | None = None
    token_ids: list[int] = field(default_factory=list)  # committed output
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    record: MaterializationRecord | None = None  # once it is Active
    is_spoiled: bool = False  # its state is not finite: nothing of it may be kept
    ending: FinishReason | None = None  # asked for while it materialises; carried out when that is stable

    @property
    def request_id(self) -> RequestId:
        """The engine's number for it."""
        return self.request.request_id

    def move_to(self, state: RequestState) -> None:
        """Takes one step of the lifecycle (Q-1)."""
        self.state = checked_transition(self.state, state)

    def take_text(self, deltas: tuple[Delta, ...]) -> None:
        """Appends committed text to its channels."""
        for delta in deltas:
            (self.content if delta.channel == "content" else self.reasoning).append(delta.text)

    def result(self, reason: FinishReason, stop_detail: str | int | None, now_ns: int) -> GenerationResult:
        """Returns the answer as it stands."""
        prompt_tokens = self.request.prompt_tokens
        cached = 0 if self.record is None else self.record.reused_tokens
        return GenerationResult(
            request_id=self.request_id,
            text="".join(self.content),
            reasoning="".join(self.reasoning),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            stop_detail=stop_detail,
            usage=Usage(
                prompt_tokens=prompt_tokens, completion_tokens=len(self.token_ids), cached_tokens=cached
            ),
            logprobs=tuple(self.logprobs) if self.wants_logprobs else None,
            materialization=self.record,
            timings=self.timings(now_ns),
        )

    def timings(self, now_ns: int) -> Timings:
        """Returns the durations of the phases reached so far."""
        submitted_ns = self.request.submitted_ns
        admitted_ns = now_ns if self.admitted_ns is None else self.admitted_ns
        first_ns = now_ns if self.first_token_ns is None else self.first_token_ns
        return Timings(
            queue_s=(admitted_ns - submitted_ns) / NS_PER_S,
            prefill_s=(first_ns - admitted_ns) / NS_PER_S,
            decode_s=(now_ns - first_ns) / NS_PER_S,
            total_s=(now_ns - submitted_ns) / NS_PER_S,
        )
