"""What one admission may start from: a source, what happens to it, and the request's own needs.

Owns: Candidate and RequestWork (N-1, N-2). It fixes source, destination, prompt and request work, but
neither Move/Fork nor victims nor placements: those follow from the complete post-state (R-9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ninfer_jax.planner.capacity import PhysicalCapacity
from ninfer_jax.planner.ids import CheckpointId
from ninfer_jax.planner.work import PrefillWork, VisionItem, prefill_work


class Disposition(IntEnum):
    """What becomes of the source owner."""

    RETAIN = 0
    CONSUME = 1


@dataclass(frozen=True)
class RequestWork:
    """The request's demands, whichever source it starts from. Build with `make_request`.

    Attributes:
        prompt_tokens: tokens of the prompt.
        capacity_tokens: tokens each pool must finally cover (A-1): prompt + effective output + provisional.
        chunk_tokens: prefill chunk.
        rewrite_frontiers: forced splits of the execution (C-7).
        vision: media items of the prompt.
    """

    prompt_tokens: int
    capacity_tokens: tuple[int, ...]
    chunk_tokens: int
    rewrite_frontiers: tuple[int, ...] = ()
    vision: tuple[VisionItem, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One source for the request (N-2).

    Attributes:
        ordinal: stable order among the request's candidates; root is 0 (O-12).
        checkpoint: the exact checkpoint row, or None for root.
        disposition: RETAIN for root and shared sources.
        request: the request's work.
        is_session_binding: the manager's tie-break fact (O-12); the physical half never reads it.
    """

    ordinal: int
    checkpoint: CheckpointId | None
    disposition: Disposition
    request: RequestWork
    is_session_binding: bool = False

    @property
    def is_root(self) -> bool:
        """Whether nothing is reused."""
        return self.checkpoint is None


def make_request(
    prompt_tokens: int,
    output_tokens: int,
    *,
    num_pools: int = 1,
    provisional_tokens: Sequence[int] = (),
    lease_tokens: int | None = None,
    chunk_tokens: int = 1024,
    rewrite_frontiers: Sequence[int] = (),
    vision: Sequence[VisionItem] = (),
) -> RequestWork:
    """Returns the work of one request.

    Args:
        output_tokens: largest effective output.
        provisional_tokens: target-defined extra growth of each pool (speculative drafts).
        lease_tokens: with `kv_lease_growth` the bounded output window (A-4); None reserves all output.

    >>> make_request(100, 50).capacity_tokens
    (150,)
    """
    if prompt_tokens < 1 or output_tokens < 0:
        raise ValueError(
            f"expected prompt >= 1 and output >= 0 tokens, got {prompt_tokens} and {output_tokens}"
        )
    extra = tuple(provisional_tokens) or (0,) * num_pools
    if len(extra) != num_pools:
        raise ValueError(f"provisional_tokens has {len(extra)} entries for {num_pools} pools")
    growth = output_tokens if lease_tokens is None else min(output_tokens, lease_tokens)
    return RequestWork(
        prompt_tokens,
        tuple(prompt_tokens + growth + e for e in extra),
        chunk_tokens,
        tuple(sorted(set(rewrite_frontiers))),
        tuple(vision),
    )


def root_candidate(request: RequestWork, *, ordinal: int = 0) -> Candidate:
    """Returns the candidate that reuses nothing; it is always present (N-1)."""
    return Candidate(ordinal, None, Disposition.RETAIN, request)


def remaining_prefill(request: RequestWork, base_tokens: int) -> PrefillWork:
    """Returns the prefill left after reusing `base_tokens` of the prompt."""
    return prefill_work(
        min(base_tokens, request.prompt_tokens),
        request.prompt_tokens,
        chunk_tokens=request.chunk_tokens,
        frontiers=request.rewrite_frontiers,
        vision=request.vision,
    )


def capture_candidate(capacity: PhysicalCapacity, kv_tokens: Sequence[int]) -> Candidate:
    """Returns what a shared capture into Device memory needs, as a candidate without source (K-5).

    One state image, and one page of every pool whose frontier is not page aligned.

    Args:
        kv_tokens: typed frontier of the active sequence in each pool.
    """
    page = capacity.page_tokens
    copies = tuple(page if tokens % page else 0 for tokens in kv_tokens)
    return root_candidate(RequestWork(1, copies, page))
