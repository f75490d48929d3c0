"""The physical half as the functions that a search is given (design 3.4).

Owns: the binding of one Problem to `Assess`, `Confirm`, `Outcomes` and `Successors`. What is remembered
between calls follows from the problem alone and goes with the object, which ends the planning session (G-12).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from ninfer_jax.planner.outcomes import OutcomeTables, checkpoint_outcomes, make_outcome_tables
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.projection import are_identities, assess, assess_numpy
from ninfer_jax.planner.resolution import Placement, confirm, place_target
from ninfer_jax.planner.search_types import Assessment, CheckpointOutcomes, Confirmation
from ninfer_jax.planner.sparse_projection import SparseTables, assess_sparse, make_sparse_tables
from ninfer_jax.planner.successors import SuccessorTables, make_successor_tables, successors
from ninfer_jax.planner.tables import Tables
from ninfer_jax.planner.target import TargetBatch


@dataclass(frozen=True, eq=False)
class PhysicalFunctions:
    """The four physical callables of one planning session; each method is one Protocol of `search_types`.

    Attributes:
        device_tables: tables that the caller committed to the CPU device, or None (see `projection.assess`).
        placements: of the target that was confirmed last, for the seal that mostly follows.
        compiled: whether batches go through the compiled projection. Both give the same bits; on a CPU the
            NumPy one took 0.65 to 1.0 of its processor time from 4 to 4,096 targets, and has no dispatch.
    """

    problem: Problem
    device_tables: Tables | None
    compiled: bool
    placements: dict[tuple[int, bytes], Placement] = field(default_factory=dict)

    @cached_property
    def sparse_tables(self) -> SparseTables:
        """Returns the tables of `sparse_projection`, made when somebody is put under pressure."""
        return make_sparse_tables(self.problem)

    @cached_property
    def outcome_tables(self) -> OutcomeTables:
        """Returns the tables of `outcomes`, made on first use: a round without pressure needs none."""
        return make_outcome_tables(self.problem)

    @cached_property
    def successor_tables(self) -> SuccessorTables:
        """Returns the tables of `successors`, made on first use."""
        return make_successor_tables(self.problem)

    def assess(self, targets: TargetBatch, /) -> Assessment:
        """Returns one row per target (Protocol `Assess`)."""
        if self.compiled:
            return assess(self.problem, targets, self.device_tables)
        few = len(targets) <= len(self.problem.candidates)
        if not len(targets) or (few and are_identities(self.problem, targets)):
            return assess_numpy(self.problem, targets)
        return assess_sparse(self.sparse_tables, targets)

    def confirm(self, target: TargetBatch, /) -> Confirmation:
        """Returns the exact feasibility of one target (Protocol `Confirm`)."""
        assessment = self.assess(target)
        placement = None
        if assessment.d2h[0, 1:].any():  # the arena is asked about Host KV copies only
            self.placements.clear()
            placement = self.placements[_key(target)] = place_target(self.problem, target)
        return confirm(self.problem, target, assessment, placement)

    def placement(self, target: TargetBatch, /) -> Placement:
        """Returns the target's resolution and place; the last confirmed one is remembered."""
        return self.placements.get(_key(target)) or place_target(self.problem, target)

    def outcomes(self, targets: TargetBatch, /) -> CheckpointOutcomes:
        """Returns the checkpoints' fates (Protocol `Outcomes`)."""
        return checkpoint_outcomes(self.problem, self.outcome_tables, targets)

    def successors(
        self,
        target: TargetBatch,
        /,
        *,
        residual: np.ndarray,
        limit: int | None = None,
        licensed: np.ndarray | None = None,
    ) -> TargetBatch:
        """Returns further degradations of one target (Protocol `Successors`)."""
        return successors(self.successor_tables, target, residual=residual, limit=limit, licensed=licensed)


def _key(target: TargetBatch) -> tuple[int, bytes]:
    return int(target.candidate[0]), target.codes.tobytes()


def physical_functions(
    problem: Problem, *, device_tables: Tables | None = None, compiled: bool = False
) -> PhysicalFunctions:
    """Returns the callables of one planning session."""
    return PhysicalFunctions(problem, device_tables, compiled)
