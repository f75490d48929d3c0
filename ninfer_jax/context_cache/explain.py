"""An admission as a `PlanOutcome`: one screen for a person, one file for a replay.

Owns the hand-over only. This is the one place that passes the parts of a round on to the planner's own
explanation; nothing here reads them.
"""

from __future__ import annotations

from ninfer_jax.context_cache.records import Admission
from ninfer_jax.planner.outcome import PlanOutcome, make_outcome
from ninfer_jax.planner.problem_json import PlanInputs


def outcome_of(admission: Admission) -> PlanOutcome:
    """Returns everything needed to explain the admission's plan and to repeat it bit for bit."""
    problem = admission.problem
    inputs = PlanInputs(
        state=problem.state,
        candidates=problem.candidates,
        facts=admission.facts,
        model=admission.model,
        budget=admission.budget,
        vacant=admission.vacant,
        publishes=admission.request.participates,
        recency=admission.recency,
        intent=admission.intent,
    )
    return make_outcome(inputs, problem, admission.planned)
