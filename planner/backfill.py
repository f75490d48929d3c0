"""The persistent backfill proof (A-7): a later request may start only if the blocked head stays possible.

Owns: that one proof, on the same transitions and projection as admission itself. No finishing times: it
asks what remains when the donors are gone, whenever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.candidate import RequestWork, root_candidate
from ninfer_jax.planner.extents import Blocked
from ninfer_jax.planner.ids import OwnerId, OwnerKind, Revision
from ninfer_jax.planner.operations import evict
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import Problem, make_problem, maximal_targets
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.resolution import place_recipe, resolve
from ninfer_jax.planner.target import TargetBatch, take


@dataclass(frozen=True)
class BackfillProof:
    """The head can still become Active from root after its donors end; bound to one revision."""

    revision: Revision


@dataclass(frozen=True, eq=False)
class BackfillRefused:
    """Why not: the borrower does not fit now, or the head would miss `residual` units afterwards."""

    reason: str
    residual: np.ndarray  # int32[R]


def prove_backfill(
    problem: Problem, borrower: TargetBatch, *, head: RequestWork, donors: Sequence[OwnerId]
) -> BackfillProof | BackfillRefused:
    """Returns the proof that admitting the borrower now cannot strand the head.

    state - donors' reservations + borrower's full reservation + head from root <= capacity, with everything
    inactive and unprotected released. Borrowers admitted earlier are active in the state and stay in it.

    Args:
        problem: the borrower's planning round, in the current stable state.
        borrower: the borrower's chosen target, a batch of one.
        head: the blocked head's work.
        donors: active owners whose terminal release the head waits for.
    Raises:
        ValueError: if a donor row is not active.
    """
    state = problem.state
    for donor in donors:
        if state.owner_kind[donor] != OwnerKind.ACTIVE:
            raise ValueError(f"donor row {donor} is not active in revision {state.revision}")
    now = assess_numpy(problem, borrower)
    if not bool(now.fits[0]) or isinstance(place_recipe(problem, resolve(problem, borrower))[1], Blocked):
        return BackfillRefused("the borrower's own target does not fit", now.residual[0])
    after, _ = apply(problem, borrower)
    for donor in donors:
        after = evict(after, donor)
    lanes = int(np.count_nonzero(after.owner_kind == OwnerKind.ACTIVE))
    if lanes >= state.capacity.lanes:
        return BackfillRefused("no lane would be left for the head", np.zeros_like(now.residual[0]))
    round_of_head = make_problem(after, [root_candidate(head)], max_options=3)
    last = assess_numpy(round_of_head, take(maximal_targets(round_of_head), np.array([0])))
    if not bool(last.fits[0]):
        return BackfillRefused("the head would not fit beside the borrower", last.residual[0])
    return BackfillProof(Revision(state.revision))


def is_proof_stale(proof: BackfillProof, revision: int) -> bool:
    """Returns whether the proof was taken in another revision and must be recomputed."""
    return int(proof.revision) != int(revision)
