"""Materialisation search: which source, and what becomes of every inactive owner (G-1..G-14).

Owns: the order of the mandatory part and the way into the optional one. Everything a search knows about
memory and prices comes through the functions it is given; it imports neither projection nor portfolio.

    1. every identity is assessed (G-2); nothing to gain -> the best adoptable one
    2. no adoptable identity -> recency ladder (G-7) or root maximal (G-4), outside of every budget
    3. optional, inside the budgets: `search_steps`

Deterministic: the same answers and the same clock readings give the same result.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.allowance import StopReason, first_allowance
from ninfer_jax.planner.recency_ladder import climb_ladder
from ninfer_jax.planner.search_session import SearchStopped, Session
from ninfer_jax.planner.search_steps import improve
from ninfer_jax.planner.search_types import Budget, Clock
from ninfer_jax.planner.search_values import (
    Found,
    PressureDomain,
    Rejected,
    Rejection,
    SearchFunctions,
    SearchPhase,
    SearchResult,
    SearchRound,
)
from ninfer_jax.planner.target import take

__all__ = [
    "Found",
    "PressureDomain",
    "Rejected",
    "Rejection",
    "SearchFunctions",
    "SearchPhase",
    "SearchResult",
    "SearchRound",
    "StopReason",
    "search_materialization",
]


def search_materialization(
    round_: SearchRound, functions: SearchFunctions, budget: Budget, clock: Clock
) -> SearchResult:
    """Returns the best target found, with the reason to stop; `shared_capture` is the other entry (G-6).

    Args:
        budget: optional effort; identities, the ladder and the maximal targets are not charged to it.
        clock: read at the start, around each optional operation, and at the end.
    """
    session = Session(round_, functions, budget, clock)
    can = session.assess_mandatory(round_.identities)
    expandable = np.flatnonzero(~can | round_.improvable).tolist()
    is_fallback = False
    if session.best is None:
        is_fallback = _find_correctness_incumbent(session)
        if session.best is None:
            return session.result(StopReason.QUEUE_EXHAUSTED, None, is_fallback=False)
    elif not expandable:
        return session.result(StopReason.NO_PRESSURE, session.best, is_fallback=False)
    elif round_.recency is not None:
        session.licensed = np.zeros(session.num_victims, bool)
    first = session.best
    stop: StopReason | None = None
    allowance = first_allowance(
        budget.deadline_ns,
        budget.first_window_ns,
        first.price_ns,
        blocked_requests=budget.blocked_requests,
    )
    if isinstance(allowance, StopReason):
        stop = allowance
    else:
        session.allowance = allowance
        try:
            improve(session, expandable)
        except SearchStopped as stopped:
            stop = stopped.reason
    return session.result(
        stop or StopReason.QUEUE_EXHAUSTED, first, is_fallback=is_fallback and session.best is first
    )


def _find_correctness_incumbent(session: Session) -> bool:
    """Finds a feasible, adoptable target if there is one; returns whether it releases everything (G-4)."""
    if session.round.recency is not None:
        climb_ladder(session)
        if session.best is not None:
            return False
    if not session.assess_mandatory(take(session.domain.maximal, np.array([0])))[0]:
        # a source that protected owners keep resident may need less than root does
        session.assess_mandatory(session.domain.maximal)
    return session.best is not None
