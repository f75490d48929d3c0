"""Whether a shared prefix is worth publishing here and now, and at whose cost (E-6, E-7, O-10).

Owns the scenarios: the first vacant cell, or with a full catalog the cell of each entry that may be replaced.
The search is the planner's, feasibility the program's. Anything but a strict gain is Skip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ninfer_jax.context_cache.captures import DECLARED, CaptureIntent
from ninfer_jax.context_cache.catalog import CellId, entries, first_vacant
from ninfer_jax.context_cache.portfolio_facts import facts_of
from ninfer_jax.context_cache.ports import CaptureUnits
from ninfer_jax.context_cache.records import CacheState, SharedCapture
from ninfer_jax.planner.cost import MachineCostModel, prefill_ns, transfer_ns
from ninfer_jax.planner.demand import Portfolio, match_matrix
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.plan import ResourcePlan
from ninfer_jax.planner.planning import capture_scenario
from ninfer_jax.planner.portfolio import NewCheckpoint, capture_gains, make_value, saving
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.publication import PublicationSlots
from ninfer_jax.planner.search_types import Adoptable, Assessment
from ninfer_jax.planner.shared_capture import CaptureScenario, plan_shared_capture
from ninfer_jax.planner.transition import seal
from ninfer_jax.planner.work import Direction, Phase, TransferWork, prefill_work
from ninfer_jax.reuse import PrefixKey


class _Scenario(NamedTuple):
    """One way to get a cell; `replaced` must be evicted by the target itself."""

    cell: CellId
    replaced: int | None  # owner row


def plan_shared(
    state: CacheState,
    problem: Problem,
    model: MachineCostModel,
    units: CaptureUnits,
    intent: CaptureIntent,
    key: PrefixKey,
    *,
    rewrite_frontiers: Sequence[int],
    blocked_requests: int,
) -> SharedCapture | None:
    """Returns the shared capture with the largest strictly positive NetGain, or None: the baseline stays.

    Args:
        problem: the round of the capture at its frontier.
        key: of the captured prefix.
        rewrite_frontiers: splits of a rebuild (C-7).
        blocked_requests: other requests that the global transition makes wait.
    """
    ways = _ways(state)
    facts = facts_of(state, problem, state.portfolio)
    new = NewCheckpoint(
        _saving(model, units, intent.frontier_tokens, rewrite_frontiers),
        _matches(state.portfolio, key),
        bool(intent.evidence & DECLARED),
    )
    before = make_value(problem, facts, model)
    after = make_value(problem, facts, model, new=new)

    def net_gain(targets, assessment: Assessment) -> np.ndarray:
        return capture_gains(before, after, targets, assessment, blocked_requests=blocked_requests)

    scenarios: list[CaptureScenario] = []
    usable: list[_Scenario] = []
    for way in ways:
        adoptable = _adoptable(problem, way)
        if adoptable is not None:
            usable.append(way)
            scenarios.append(capture_scenario(problem, net_gain, adoptable=adoptable))
    result = plan_shared_capture(scenarios)
    if result.scenario is None or result.found is None:
        return None
    sealed = seal(problem, result.found.target)
    if not isinstance(sealed, ResourcePlan):
        return None  # the arena refused it: a capture that cannot complete is a skip (Y-6)
    way = usable[result.scenario]
    return SharedCapture(key, intent.evidence, way.cell, problem, result.found.target, sealed, result.gain_ns)


def _ways(state: CacheState) -> list[_Scenario]:
    vacant = first_vacant(state.catalog, OwnerKind.SHARED)
    if vacant is not None:
        return [_Scenario(vacant, None)]
    # an entry that is read or claimed is no victim of the round, and its scenario falls away there
    return [
        _Scenario(at, int(entry.summary.owner))
        for at, entry in entries(state.catalog)
        if at.kind is OwnerKind.SHARED
    ]


def _adoptable(problem: Problem, way: _Scenario) -> Adoptable | None:
    """Returns the rule of one scenario; None if the entry to replace is no victim of this round."""
    freeing = np.zeros(problem.num_victims, bool)
    if way.replaced is not None:
        freeing = problem.victims == way.replaced
        if not freeing.any():
            return None
    consumes = np.zeros(len(problem.candidates), bool)
    # the same counting as for private cells: a vacant one, or that of one particular evicted owner
    return PublicationSlots(True, int(way.replaced is None), freeing, consumes)


def _saving(
    model: MachineCostModel, units: CaptureUnits, frontier_tokens: int, rewrite_frontiers: Sequence[int]
) -> int:
    """Returns what the captured prefix saves its next reader: a rebuild, less a fork from Device (O-5)."""
    work = prefill_work(
        0, frontier_tokens, chunk_tokens=units.prefill_chunk_tokens, frontiers=rewrite_frontiers
    )
    tails = len(units.page_bytes) if frontier_tokens % units.page_tokens else 0
    tail_bytes = sum(units.page_bytes) if tails else 0
    fork = TransferWork(Phase.CANDIDATE, Direction.D2D, 1 + tails, units.state_bytes + tail_bytes)
    return saving(prefill_ns(model, work), transfer_ns(model, [fork]))


def _matches(portfolio: Portfolio, key: PrefixKey) -> np.ndarray:
    """Returns bool[W], demand records that name the key."""
    return match_matrix(portfolio, [key])[0]
