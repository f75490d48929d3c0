"""The wired call: readiness, sealed plan, price by cause, repeatability (G-4, G-5, G-14, RDY, PLAN)."""

import itertools
import random

import numpy as np
import pytest

from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.cost import GENERIC_GPU
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.operations import CheckpointSpec, activate_root, add_owner, evict, set_transaction
from ninfer_jax.planner.plan import Readiness
from ninfer_jax.planner.planning import plan_materialization
from ninfer_jax.planner.portfolio import make_facts
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.publication import publication_slots
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.planner.state import make_state


def machine(*, pages, lanes=2, host=0):
    return make_state(
        make_capacity(
            device_state_slots=16,
            device_pages=pages,
            host_state_slots=host,
            host_kv_granules=host * 10,
            granule_bytes=10,
            state_image_bytes=100,
            lanes=lanes,
        )
    )


def plan(state, candidates, *, clock=None, budget=None, vacant=1, recency=None):
    problem = make_problem(state, candidates)
    return plan_materialization(
        problem,
        make_facts(problem),
        GENERIC_GPU,
        adoptable=publication_slots(problem, vacant=vacant),
        budget=budget or Budget(),
        clock=clock or (lambda: 0),
        recency=recency,
    )


def test_rdy_01_permanently_infeasible():  # G-5
    got = plan(machine(pages=10), [root_candidate(make_request(700, 0))])
    assert (got.readiness, got.search, got.plan) == (Readiness.PERMANENTLY_INFEASIBLE, None, None)


def test_rdy_02_temporarily_blocked_then_ready():
    state, active = activate_root(machine(pages=10), 64 * 6)
    root = [root_candidate(make_request(64 * 6, 0))]
    assert plan(state, root).readiness == Readiness.TEMPORARILY_BLOCKED
    assert plan(evict(state, active), root).readiness == Readiness.READY


def test_rdy_04_ready_by_move():
    state, _ = add_owner(machine(pages=10), [CheckpointSpec(128)])
    request = make_request(300, 0)
    got = plan(state, [root_candidate(request), Candidate(1, 0, Disposition.CONSUME, request)])
    assert got.readiness == Readiness.READY
    assert got.plan.reused_tokens == 128
    assert got.plan.candidate.ordinal == 1


def test_rdy_06_an_open_transaction_blocks():
    state = set_transaction(machine(pages=10), is_open=True)
    assert plan(state, [root_candidate(make_request(64, 0))]).readiness == Readiness.TEMPORARILY_BLOCKED


def test_plan_04_needs_transfer_without_any_budget():
    state, _ = add_owner(machine(pages=8), [CheckpointSpec(64 * 6)])
    nothing = Budget(max_targets=0, deadline_ns=0)
    got = plan(state, [root_candidate(make_request(64 * 4, 0))], budget=nothing)
    assert got.readiness == Readiness.NEEDS_TRANSFER
    assert got.search.is_fallback
    assert got.plan.victims[0].evicted


def test_the_price_by_cause_adds_up_to_j():
    state = machine(pages=14, host=2)
    for i in range(3):
        kind = OwnerKind.SHARED if i == 2 else OwnerKind.PRIVATE
        state, _ = add_owner(state, [CheckpointSpec(64 * 4)], kind=kind)
    got = plan(state, [root_candidate(make_request(64 * 9, 0))])
    assert got.search.best.assessment.degraded[0] > 0
    assert got.price.total_ns == got.search.best.price_ns


def test_recorded_readings_repeat_the_plan():
    state = machine(pages=40, host=8)
    for i in range(7):
        state, _ = add_owner(state, [CheckpointSpec(64 * (2 + i % 4)), CheckpointSpec(64, kind=3, ordinal=1)])
    root = [root_candidate(make_request(64 * 25, 0))]
    rng = random.Random(3)
    ticking = itertools.accumulate(rng.randrange(2_000_000) for _ in itertools.count())
    first = plan(state, root, clock=lambda: next(ticking))
    again = plan(state, root, clock=iter(first.readings).__next__)
    assert first.readings == again.readings
    assert first.search.stop == again.search.stop
    np.testing.assert_array_equal(first.search.best.target.codes, again.search.best.target.codes)
    assert first.plan.plan_id == again.plan.plan_id
    assert first.plan.steps == again.plan.steps


def test_root_comes_first():
    state, _ = add_owner(machine(pages=10), [CheckpointSpec(128)])
    with pytest.raises(ValueError, match="first candidate must be root"):
        plan(state, [Candidate(0, 0, Disposition.CONSUME, make_request(300, 0))])


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_planned_can_be_applied(naive, seed):
    """Invariants 4, 5, 12: planned targets execute on random states, with recency and without."""
    rng = random.Random(seed)
    state = naive.random_state(seed, apply=apply, make_problem=make_problem)
    problem = make_problem(state, naive.random_candidates(state, rng))
    recency = np.arange(state.num_owners) if seed % 3 == 0 else None
    got = plan_materialization(
        problem,
        make_facts(problem),
        GENERIC_GPU,
        adoptable=publication_slots(problem, vacant=seed % 2),
        budget=Budget(max_targets=200),
        clock=lambda: 0,
        recency=recency,
    )
    if got.plan is not None:
        after, _ = apply(problem, got.search.best.target)
        assert (got.plan.used[-1] <= after.capacity.units()).all()
    else:
        assert got.readiness in (Readiness.TEMPORARILY_BLOCKED, Readiness.PERMANENTLY_INFEASIBLE)
