"""What program, manager and worker say to each other about reusable context: names, summaries, results.

Owns plain frozen values only. None of them proves anything: a key narrows, a reference may be stale, and a
summary is what the program reported last. The program alone verifies (C-6, D-5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.ids import CheckpointId, CheckpointRef, Generation, OwnerId, OwnerKind, Revision
from ninfer_jax.planner.plan import Aborted, Committed
from ninfer_jax.request import SequenceHandle

SourceKind: TypeAlias = Literal[
    "root",
    "private_endpoint",
    "private_turn_closure",
    "private_response_replay",
    "private_long_anchor",
    "shared_stable_prefix",
]
MissReason: TypeAlias = Literal[
    "no_match", "no_state", "identity_mismatch", "evicted", "infeasible", "disabled", "below_minimum"
]


class PrefixKey(NamedTuple):
    """A short name of one prompt prefix; equal prefixes have equal keys, the reverse is only likely (C-6)."""

    lane0: int  # never 0
    lane1: int
    frontier_tokens: int
    mode: str


class OwnerKey(NamedTuple):
    """One occupation of an owner row; the row's next owner has another generation (R-12)."""

    owner: OwnerId
    generation: Generation


@dataclass(frozen=True)
class CheckpointSummary:
    """One recoverable frontier of an owner, as the program last reported it."""

    ref: CheckpointRef
    row: CheckpointId
    frontier_tokens: int
    key: PrefixKey


@dataclass(frozen=True)
class OwnerSummary:
    """One owner with all of its checkpoints, shallowest first."""

    owner: OwnerId
    generation: Generation
    kind: OwnerKind
    checkpoints: tuple[CheckpointSummary, ...]

    @property
    def owner_key(self) -> OwnerKey:
        """The row with its generation."""
        return OwnerKey(self.owner, self.generation)

    @property
    def refs(self) -> frozenset[CheckpointRef]:
        """The references of its checkpoints."""
        return frozenset(c.ref for c in self.checkpoints)


@dataclass(frozen=True)
class SourceChoice:
    """One source that a request may start from, verified, and what would become of it (N-2)."""

    ref: CheckpointRef | None  # None is root
    disposition: Disposition
    is_session_binding: bool = False


ROOT_CHOICE = SourceChoice(None, Disposition.RETAIN)


@dataclass(frozen=True)
class TransitionResult:
    """What is true now that one transition is stable; absolute facts, no deltas (X-8).

    Attributes:
        active: the new active sequence of a materialisation, else None.
        owners: final summary of every touched owner that still exists: victims, a retained source, the owner
            that was made or captured from, the one that was published.
    """

    outcome: Committed | Aborted
    active: SequenceHandle | None
    owners: tuple[OwnerSummary, ...]


def zero_stage_result(
    revision: int,
    owners: Sequence[OwnerSummary] = (),
    *,
    name: str = "",
    deleted: Sequence[CheckpointRef] = (),
    evicted: Sequence[OwnerId] = (),
) -> TransitionResult:
    """Returns the result of a transition without stages: a private capture, a finish, a release (X-1)."""
    outcome = Committed(name, Revision(revision), None, tuple(deleted), tuple(evicted))
    return TransitionResult(outcome, None, tuple(owners))
