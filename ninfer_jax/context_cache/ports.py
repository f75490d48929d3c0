"""What the manager needs from the program; all of it opaque handles and verdicts.

Owns the Protocols only. The manager passes `Problem` and targets on and never reads placements, occupancy or
page geometry (D-2); `CaptureUnits` are prices' sizes, fixed at start, not amounts in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ninfer_jax.identity import PromptIdentity
from ninfer_jax.planner.backfill import BackfillProof, BackfillRefused
from ninfer_jax.planner.ids import CheckpointRef
from ninfer_jax.planner.problem import Problem
from ninfer_jax.request import SequenceHandle
from ninfer_jax.reuse import SourceChoice


class Work(Protocol):
    """The program's description of one request; a frozen dataclass with the frontiers to stop prefill at."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def capture_frontiers(self) -> tuple[int, ...]:
        """Where prefill stops to capture; the manager decides them."""
        ...


@dataclass(frozen=True)
class CaptureUnits:
    """Sizes that price a capture's recovery.

    Args:
        page_tokens: tokens of one page.
        prefill_chunk_tokens: tokens of one prefill chunk.
        state_bytes: one StateImage.
        page_bytes: one page of each pool.
    """

    page_tokens: int
    prefill_chunk_tokens: int
    state_bytes: int
    page_bytes: tuple[int, ...]


class ProgramPort(Protocol):
    """The physical authority as the manager sees it."""

    @property
    def resource_revision(self) -> int:
        """The current revision (R-11)."""
        ...

    def verify(self, ref: CheckpointRef, identity: PromptIdentity) -> bool:
        """Returns whether the checkpoint lives, is valid and is exactly this prompt's prefix (C-1, C-5)."""
        ...

    def problem(self, work: Any, choices: Sequence[SourceChoice], /) -> Problem:
        """Returns the planning round of one request at the current revision; choices[0] is root."""
        ...

    def capture_problem(self, handle: SequenceHandle, /) -> Problem:
        """Returns the round of a shared capture at the sequence's committed frontier (K-5)."""
        ...

    def backfill(
        self, problem: Problem, target: Any, /, *, head: Any, donors: Sequence[SequenceHandle]
    ) -> BackfillProof | BackfillRefused:
        """Returns the persistent backfill proof for a planned borrower (A-7)."""
        ...
