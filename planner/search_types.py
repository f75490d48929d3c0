"""The seam between the physical half and the search: what the search is given, and nothing else.

Owns: Assessment and the Protocols of the injected functions (design 3.4). The search imports this file and
`target`, `plan`; it never imports state, tables or projection, and the physical half never imports the
search. `functions.physical_functions` makes the physical ones from a `Problem`.

Letters: B targets, V victims, R axes, J items (StateImage, page of each pool), Q checkpoints of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from ninfer_jax.planner.target import TargetBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Assessment:
    """What the projection says about B targets; NumPy int32 arrays, row b = target b.

    `fits` is the array test of every stage and axis; the exact arena geometry is asked by `Confirm` before a
    target becomes an incumbent.
    """

    used: np.ndarray  # int32[B, stages + 1, R], occupancy after each stage; row 0 is the start state
    peak: np.ndarray  # int32[B, R], max over the stages
    residual: np.ndarray  # int32[B, R], units missing per axis at the peak; 0 everywhere iff it fits
    fits: np.ndarray  # bool[B]
    d2h: np.ndarray  # int32[B, J], units copied to Host under pressure
    d2h_ops: np.ndarray  # int32[B, J]
    h2d: np.ndarray  # int32[B, J], units restored for the candidate
    h2d_ops: np.ndarray  # int32[B, J]
    d2d: np.ndarray  # int32[B, J], state forks and partial-tail copies on Device; one operation per unit
    is_fork: np.ndarray  # bool[B], state copied or restored instead of moved in place
    evictions: np.ndarray  # int32[B], owners evicted
    drops: np.ndarray  # int32[B], checkpoints deleted, those of evicted owners included
    degraded: np.ndarray  # int32[B], owners whose code is neither KEEP nor ABSENT


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CheckpointOutcomes:
    """Fate of the problem's checkpoints in B targets, for `portfolio`; rows of `Problem.checkpoints`.

    A checkpoint that is not `alive` is recovered from a shallower one or from root. The consumed source and
    what its disposition releases are reported as in the candidate's identity state (O-11).
    """

    alive: np.ndarray  # bool[B, Q]
    state_on_device: np.ndarray  # bool[B, Q]
    h2d_pages: np.ndarray  # int32[B, Q, N], required pages that are on Host only
    h2d_ops: np.ndarray  # int32[B, Q], page copies that a restore needs


@dataclass(frozen=True)
class Confirmation:
    """Exact answer for one target: geometry included (R-2, K-7).

    Attributes:
        ok: whether the complete recipe can be executed.
        residual: int32[R]; a geometric failure shows on the HOST_KV axis.
    """

    ok: bool
    residual: np.ndarray  # int32[R]


class Assess(Protocol):
    """Projects targets. Pure and deterministic; any batch size gives the same rows."""

    def __call__(self, targets: TargetBatch, /) -> Assessment:
        """Returns one row per target."""
        ...


class Confirm(Protocol):
    """Asks the exact arena geometry of one target (a batch of one)."""

    def __call__(self, target: TargetBatch, /) -> Confirmation:
        """Returns the exact feasibility."""
        ...


class Outcomes(Protocol):
    """Reports the checkpoints' fates; asked only for targets that fit."""

    def __call__(self, targets: TargetBatch, /) -> CheckpointOutcomes:
        """Returns one row per target."""
        ...


class Successors(Protocol):
    """Enumerates legal further degradations of one target (T-5): one owner, or joint holders.

    Ordered so that the most helpful for `residual` come first; nothing legal is left out (T-6) unless `limit`
    cuts the tail. `licensed` forbids full eviction of the owners where it is False (G-7).
    """

    def __call__(
        self,
        target: TargetBatch,
        /,
        *,
        residual: np.ndarray,
        limit: int | None = None,
        licensed: np.ndarray | None = None,
    ) -> TargetBatch:
        """Returns the successors as a batch, none of them equal to `target`."""
        ...


class Value(Protocol):
    """Prices targets: J in integer nanoseconds, saturated (O-9, O-13). Never called to decide feasibility."""

    def __call__(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B], one J per target, those that do not fit included (they guide the search)."""
        ...


class TieBreak(Protocol):
    """Orders targets of equal J (O-12); the targets' own codes come after it."""

    def __call__(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B, T], compared left to right, the smaller row wins."""
        ...


class Adoptable(Protocol):
    """Asks the manager whether the end state can be published logically (R-3, Y-5)."""

    def __call__(self, targets: TargetBatch, /) -> np.ndarray:
        """Returns bool[B]."""
        ...


class Clock(Protocol):
    """Monotone nanoseconds; a fake one in tests."""

    def __call__(self) -> int:
        """Returns now in nanoseconds."""
        ...


@dataclass(frozen=True)
class Budget:
    """Optional effort of one search (G-10, G-11). Identity and root-maximal are outside of it.

    Attributes:
        max_targets: distinct targets assessed at most.
        max_work: projected (target, owner) cells at most.
        arena_targets: targets the session may store.
        deadline_ns: allowance left at this admission boundary.
        first_window_ns: the first grant; an extension needs attainable gain.
        blocked_requests: other runnable requests that wait for this planning.
    """

    max_targets: int = 4096
    max_work: int = 4096 * 64
    arena_targets: int = 4096
    deadline_ns: int = 50_000_000
    first_window_ns: int = 5_000_000
    blocked_requests: int = 0
