"""Whether a target leaves a private catalog cell for the request to publish into (R-3, Y-5).

Owns: the counting rule over a problem's victims. Owns no catalog: how many cells are vacant is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.target import EVICT, TargetBatch


@dataclass(frozen=True, eq=False)
class PublicationSlots:
    """Protocol `Adoptable`: a consumed source's cell, a vacant one, or that of an evicted private victim."""

    publishes: bool
    vacant: int
    is_private: np.ndarray  # bool[V]
    consumes: np.ndarray  # bool[D]

    def __call__(self, targets: TargetBatch, /) -> np.ndarray:
        """Returns bool[B]."""
        if not self.publishes or self.vacant > 0:
            return np.ones(len(targets), bool)
        freed = ((targets.codes == EVICT) & self.is_private).any(1)
        return freed | self.consumes[targets.candidate]


def publication_slots(problem: Problem, *, vacant: int, publishes: bool = True) -> PublicationSlots:
    """Returns the rule for one problem.

    Args:
        vacant: private cells that are free now.
        publishes: whether the request will publish a continuation at all.
    """
    kinds = problem.state.owner_kind[problem.victims]
    consumes = [c.disposition == Disposition.CONSUME for c in problem.candidates]
    return PublicationSlots(publishes, vacant, kinds == OwnerKind.PRIVATE, np.asarray(consumes, bool))
