"""Optional shared capture: complete targets per scenario, and Skip unless one gains strictly (G-6, E-6, E-7).

Owns: the second typed entry of the search, the division of the fixed target budget over scenarios, the choice
among them. Reserves nothing and reads no clock: the budget is a number of targets (G-11). What a scenario
means (vacant slot, recycled entry, replacement) is the manager's; here it is an ordinal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from ninfer_jax.planner.search import (
    Found,
    PressureDomain,
    SearchFunctions,
    SearchResult,
    SearchRound,
    search_materialization,
)
from ninfer_jax.planner.search_types import Adoptable, Assess, Assessment, Budget, Confirm, Successors
from ninfer_jax.planner.target import KEEP, TargetBatch, take

CAPTURE_TARGETS: Final = 4096
_ZERO_GAIN: Final = 2**62  # price of a target that gains nothing; a price is this minus the gain


class NetGain(Protocol):
    """Prices capture targets (O-10)."""

    def __call__(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B]; anything that saturated is 0, never a gain."""
        ...


@dataclass(frozen=True, eq=False)
class CaptureScenario:
    """One way to make room, with the functions of its own problem.

    Attributes:
        identity: the capture and nothing else, a batch of one.
        maximal: the capture with everything released that may be, a batch of one.
        may_degrade: whether the evidence may put pressure on others (E-1); EngineStructural may not.
    """

    identity: TargetBatch
    maximal: TargetBatch
    capacity: np.ndarray  # int32[R]
    num_options: int
    assess: Assess
    confirm: Confirm
    successors: Successors
    net_gain: NetGain
    adoptable: Adoptable
    may_degrade: bool = True


@dataclass(frozen=True, eq=False)
class CaptureResult:
    """The chosen scenario and target, or Skip (`scenario` None)."""

    scenario: int | None
    found: Found | None
    gain_ns: int
    searches: tuple[SearchResult, ...]

    @property
    def is_skip(self) -> bool:
        """Whether the private-only baseline stays."""
        return self.scenario is None


def plan_shared_capture(
    scenarios: Sequence[CaptureScenario], *, max_targets: int = CAPTURE_TARGETS
) -> CaptureResult:
    """Returns the capture with the largest NetGain, or Skip if none is strictly positive.

    Ties go to the earlier scenario, then to fewer degraded owners, fewer dropped checkpoints, lower codes.

    Args:
        max_targets: divided evenly, at least one for each scenario.
    """
    best: tuple[int, int] | None = None
    searches = []
    for i, scenario in enumerate(scenarios):
        share = max(max_targets // len(scenarios), 1)
        result = _search(scenario, share)
        searches.append(result)
        gain = 0 if result.best is None else _ZERO_GAIN - result.best.price_ns
        if gain > 0 and (best is None or gain > best[1]):
            best = (i, gain)
    if best is None:
        return CaptureResult(None, None, 0, tuple(searches))
    return CaptureResult(best[0], searches[best[0]].best, best[1], tuple(searches))


def _search(scenario: CaptureScenario, max_targets: int) -> SearchResult:
    identity = scenario.identity
    keep_all = np.full(identity.codes.shape[1], KEEP, np.int32)
    domain = PressureDomain(scenario.maximal if scenario.may_degrade else identity, keep_all)
    round_ = SearchRound(identity, scenario.capacity, np.zeros(1, bool), scenario.num_options, lambda: domain)

    def price(targets: TargetBatch, assessment: Assessment) -> np.ndarray:
        return _ZERO_GAIN - scenario.net_gain(targets, assessment)

    def tie_break(targets: TargetBatch, assessment: Assessment) -> np.ndarray:
        return np.stack([assessment.degraded, assessment.drops], -1).astype(np.int64)

    def successors(
        target: TargetBatch,
        *,
        residual: np.ndarray,
        limit: int | None = None,
        licensed: np.ndarray | None = None,
    ) -> TargetBatch:
        if not scenario.may_degrade:
            return take(target, np.zeros(0, np.int64))
        return scenario.successors(target, residual=residual, limit=limit, licensed=licensed)

    def adoptable(targets: TargetBatch) -> np.ndarray:
        spares_all = (targets.codes == KEEP).all(1)
        return scenario.adoptable(targets) & (spares_all | scenario.may_degrade)

    functions = SearchFunctions(scenario.assess, scenario.confirm, successors, price, tie_break, adoptable)
    budget = Budget(max_targets=max_targets, arena_targets=max_targets)
    return search_materialization(round_, functions, budget, lambda: 0)
