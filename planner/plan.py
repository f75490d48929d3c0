"""The contract between planner, program and manager: readiness, sealed plans, absolute results.

Owns: Readiness, ResourcePlan with its ordered steps, ResourceResult, `is_stale`. The steps are made by
`transition.seal`; executing them is the program's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np
from ninfer_jax.planner.candidate import Candidate
from ninfer_jax.planner.ids import CheckpointRef, Generation, ImageId, OwnerId, Revision, RunId
from ninfer_jax.planner.work import Work


class Readiness(Enum):
    """Exactly four answers to "can this request become Active?" (G-14)."""

    PERMANENTLY_INFEASIBLE = "even an isolated root exceeds the capacity"
    TEMPORARILY_BLOCKED = "an active guarantee, a lane or an open transaction is in the way"
    NEEDS_TRANSFER = "feasible after releases or copies"
    READY = "feasible at once"


class StageName(IntEnum):
    """Canonical order of one transition (R-10, X-5)."""

    HOST_RELEASES = 0
    COPY_PREPARATION = 1
    COPIES_IN_FLIGHT = 2
    COPY_PUBLICATION = 3
    RESTORE = 4
    COMMITTED = 5


class Action(Enum):
    """What one step does to one object. `tier` in the name says which replica."""

    RELEASE_DEVICE = "release the Device replica"
    RELEASE_HOST = "release the Host replica"
    RESERVE_HOST = "reserve the Host destination"
    COPY_D2H = "copy Device to Host"
    PUBLISH_HOST = "publish the Host replica"
    RESTORE_H2D = "reserve a Device destination, copy Host to Device, publish"
    FORK_STATE_D2D = "copy the state image into the sequence's own slot"
    FORK_STATE_H2D = "copy the Host image into the sequence's own slot"
    MOVE_STATE = "hand the Device image to the sequence"
    NEW_STATE = "reserve an empty state image (root)"
    COPY_TAIL_D2D = "copy the partial tail page on Device"
    COPY_TAIL_H2D = "copy the partial tail page from Host into the sequence's own page"
    TAKE_PAGES = "the sequence refers to the pages"
    RESERVE_GROWTH = "reserve growth pages"
    DROP_CHECKPOINT = "delete a checkpoint"
    EVICT_OWNER = "evict a whole owner"
    CONSUME_OWNER = "the source owner becomes the active sequence"


class Step(NamedTuple):
    """One ordered action.

    Attributes:
        pages: ``(first, last)`` page range inside the run, half open; a partial range splits the run.
        pool: pool of the pages, or -1 for a state image or an owner.
        host_start: granule at which a Host destination was placed; -1 when not a Host allocation.
    """

    stage: StageName
    action: Action
    owner: OwnerId | None = None
    image: ImageId | None = None
    run: RunId | None = None
    checkpoint: CheckpointRef | None = None
    pool: int = -1
    pages: tuple[int, int] = (0, 0)
    host_start: int = -1


@dataclass(frozen=True)
class VictimClaim:
    """One degraded owner: its generation and the exact checkpoints that go (X-8)."""

    owner: OwnerId
    generation: Generation
    evicted: bool
    dropped: tuple[CheckpointRef, ...]


@dataclass(frozen=True, eq=False)
class ResourcePlan:
    """A sealed transition: immutable, bound to one revision, consumed once by the program (X-1).

    Attributes:
        plan_id: deterministic digest of revision, candidate and codes; `start` consumes it.
        used: occupancy after each stage; row 0 is the start state.
        intent: opaque schedule intent of the caller, validated and consumed by seal (G-3).
    """

    plan_id: str
    revision: Revision
    candidate: Candidate
    source: CheckpointRef | None
    victims: tuple[VictimClaim, ...]
    steps: tuple[Step, ...]
    used: np.ndarray  # int32[stages + 1, R]
    work: Work
    reused_tokens: int
    readiness: Readiness
    intent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Committed:
    """The transition reached its end; absolute facts only (X-8)."""

    plan_id: str
    revision: Revision
    active_owner: OwnerId | None
    deleted: tuple[CheckpointRef, ...]
    evicted: tuple[OwnerId, ...]


@dataclass(frozen=True)
class Aborted:
    """The transition stopped before publication; completed degradations stay and are listed (X-9)."""

    plan_id: str
    revision: Revision
    reason: str
    deleted: tuple[CheckpointRef, ...] = ()
    evicted: tuple[OwnerId, ...] = ()


ResourceResult = Committed | Aborted


def is_stale(plan: ResourcePlan, revision: int) -> bool:
    """Returns whether the plan was sealed against another revision: it must not start (X-2)."""
    return int(plan.revision) != int(revision)
