"""Optional capture: Skip unless strictly better, a budget per scenario, evidence without pressure (G-6)."""

import numpy as np
import pytest

from ninfer_jax.planner.candidate import capture_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.cost import Q32, MachineCostModel, PrefillModel, TransferCoefficients, TransferModel
from ninfer_jax.planner.demand import Demand, Portfolio, commit_demand, match_matrix
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind
from ninfer_jax.planner.operations import CheckpointSpec, activate_root, add_owner, advance, set_pin
from ninfer_jax.planner.planning import capture_scenario
from ninfer_jax.planner.portfolio import NewCheckpoint, Retention, capture_gains, make_facts, make_value
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.shared_capture import plan_shared_capture
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import EVICT

FREE = TransferCoefficients(0, 0, 0)
UNIT = MachineCostModel(TransferModel(FREE, FREE, FREE), PrefillModel(0, Q32, 0, 0, 0))


def all_adoptable(targets):
    return np.ones(len(targets), bool)


def busy_machine(*victims, slots=0, pages=0):
    """An active sequence at 100 tokens beside private owners of the given frontiers; nearly no room left."""
    need = sum(-(-v // 64) for v in victims) + 8
    state = make_state(
        make_capacity(device_state_slots=1 + len(victims) + slots, device_pages=need + pages, lanes=1)
    )
    owners = []
    for frontier in victims:
        state, o = add_owner(state, [CheckpointSpec(frontier)])
        owners.append(o)
    state, active = activate_root(state, 64 * 8)
    return advance(state, active, 100), owners


def scenario(
    state, saving, num_records, *, retention=None, adoptable=all_adoptable, credited=False, **kwargs
):
    """A capture of a checkpoint that saves `saving`, wanted by `num_records` demands."""
    demands = Portfolio()
    for i in range(num_records):
        demands = commit_demand(demands, Demand(i, creatable=frozenset(["new"])))
    problem = make_problem(state, [capture_candidate(state.capacity, (100,))])
    facts = make_facts(problem, portfolio=demands, retention=retention)
    new = NewCheckpoint(saving, match_matrix(demands, ["new"])[0], credited)
    before = make_value(problem, facts, UNIT)
    after = make_value(problem, facts, UNIT, new=new)

    def net_gain(targets, assessment):
        return capture_gains(before, after, targets, assessment)

    return problem, capture_scenario(problem, net_gain, adoptable=adoptable, **kwargs)


@pytest.mark.parametrize(("loss", "published"), [(250, False), (249, True)])
def test_val_12_only_a_strict_gain_is_published(loss, published):  # O-10
    state, (_x,) = busy_machine(loss)
    _problem, one = scenario(state, 500, 2)
    result = plan_shared_capture([one])
    assert result.is_skip is not published
    assert result.gain_ns == (1000 - 4 * 249 if published else 0)
    if published:
        assert (result.found.target.codes == EVICT).all()


def test_a_declared_credit_counts_once():  # O-8: no record wants it yet
    state, _ = busy_machine(slots=1, pages=1)
    for credited, gain in ((False, 0), (True, 500)):
        result = plan_shared_capture([scenario(state, 500, 0, credited=credited)[1]])
        assert (result.is_skip, result.gain_ns) == (not credited, gain)


def test_with_room_nobody_is_degraded():
    state, _ = busy_machine(300, 300, slots=1, pages=1)
    result = plan_shared_capture([scenario(state, 500, 2)[1]])
    assert result.gain_ns == 1000
    assert not result.found.assessment.degraded.any()


def test_structural_evidence_puts_no_pressure_on_others():  # E-1
    state, _ = busy_machine(64)
    result = plan_shared_capture([scenario(state, 500, 9, may_degrade=False)[1]])
    assert result.is_skip
    assert plan_shared_capture([scenario(state, 500, 9)[1]]).gain_ns == 9 * 500 - 4 * 64


def test_a_catalog_that_refuses_means_skip():  # SES-06
    state, _ = busy_machine(slots=1, pages=1)
    refused = scenario(state, 500, 9, adoptable=lambda t: np.zeros(len(t), bool))[1]
    assert plan_shared_capture([refused]).is_skip
    assert plan_shared_capture([]).is_skip


def test_the_least_valuable_victim_goes():
    state, owners = busy_machine(300, 100, 200)
    problem, one = scenario(state, 500, 2, retention={owners[1]: Retention.LIVE_SESSION})
    result = plan_shared_capture([one])
    assert problem.victims[result.found.target.codes[0] == EVICT].tolist() == [owners[2]]
    assert result.gain_ns == 1000 - 4 * 200


def test_several_owners_may_have_to_go_together():  # E-6: neither frees the shared page alone
    state = make_state(make_capacity(device_state_slots=4, device_pages=3, lanes=1))
    state, s = add_owner(state, [CheckpointSpec(64)], kind=OwnerKind.SHARED)
    image = int(state.checkpoint_image[0])
    kind = CheckpointKind.SHARED_STABLE_PREFIX
    state, _t = add_owner(
        state,
        [CheckpointSpec(64, kind, image=image)],
        kind=OwnerKind.SHARED,
        share_with=s,
        share_tokens=64,
    )
    state, active = activate_root(state, 128)
    state = advance(state, active, 100)
    result = plan_shared_capture([scenario(state, 500, 1)[1]])
    assert (result.found.target.codes == EVICT).all()
    assert result.gain_ns == 500


def test_cap_02_victims_are_asked_although_a_slot_is_vacant():
    state, _ = busy_machine(50, pages=1)  # no free state slot; the catalog has room
    _, one = scenario(state, 100, 2, retention={0: Retention.DISPOSABLE})
    result = plan_shared_capture([one])
    assert result.gain_ns == 200 - 50
    assert result.found.assessment.degraded.tolist() == [1]


def replacing(owner):
    """The scenario in which the catalog's only slot must be that of `owner`."""

    def adoptable_in(problem):
        row = int(np.flatnonzero(problem.victims == owner)[0])
        return lambda targets: targets.codes[:, row] == EVICT

    return adoptable_in


def shared_machine(frontier, *victims, pages):
    """A full catalog of one shared entry T beside private owners, `pages` free pages, no free state slot."""
    need = sum(-(-v // 64) for v in (frontier, *victims)) + 8
    state = make_state(make_capacity(device_state_slots=2 + len(victims), device_pages=need + pages, lanes=1))
    state, t = add_owner(state, [CheckpointSpec(frontier)], kind=OwnerKind.SHARED)
    owners = []
    for v in victims:
        state, o = add_owner(state, [CheckpointSpec(v)])
        owners.append(o)
    state, active = activate_root(state, 64 * 8)
    return advance(state, active, 100), t, owners


def replacement(state, t, saving, t_records, new_records):
    demands = Portfolio()
    for i in range(t_records):
        demands = commit_demand(demands, Demand(("t", i), frozenset(["t"])))
    for i in range(new_records):
        demands = commit_demand(demands, Demand(("n", i), creatable=frozenset(["new"])))
    problem = make_problem(state, [capture_candidate(state.capacity, (100,))])
    facts = make_facts(problem, portfolio=demands, keys={0: "t"})
    new = NewCheckpoint(saving, match_matrix(demands, ["new"])[0], False)
    before, after = make_value(problem, facts, UNIT), make_value(problem, facts, UNIT, new=new)
    return problem, capture_scenario(
        problem,
        lambda targets, assessment: capture_gains(before, after, targets, assessment),
        adoptable=replacing(t)(problem),
    )


@pytest.mark.parametrize(("saving", "gain"), [(400, 0), (401, 3)])
def test_cap_06_replacement_only_when_strictly_better(saving, gain):
    state, t, _ = shared_machine(600, pages=1)
    _, one = replacement(state, t, saving, t_records=2, new_records=3)
    result = plan_shared_capture([one])
    assert (result.gain_ns, result.is_skip) == (gain, gain == 0)


@pytest.mark.parametrize(("saving", "replaced"), [(2000, True), (300, False)])
def test_cap_03_replacement_and_victims_are_one_target(saving, replaced):
    """The entry lends its slot; its page stays with a protected owner, so V's must be freed as well."""
    state, t, (v,) = shared_machine(64, 200, pages=0)
    state, holder = add_owner(
        state,
        [CheckpointSpec(64, image=int(state.checkpoint_image[0]))],
        share_with=t,
        share_tokens=64,
    )
    state = set_pin(state, holder, pins=1)
    problem, one = replacement(state, t, saving, t_records=0, new_records=1)
    result = plan_shared_capture([one])
    assert result.is_skip is not replaced
    if replaced:
        gone = problem.victims[result.found.target.codes[0] == EVICT]
        assert sorted(gone.tolist()) == sorted([t, v])
        assert result.gain_ns == saving - 4 * 200


def test_ties_go_to_the_earlier_scenario_and_the_budget_is_shared():  # G-11
    state, _ = busy_machine(100, 100, 100)
    two = [scenario(state, 500, 2)[1] for _ in range(2)]
    result = plan_shared_capture(two, max_targets=11)
    assert result.scenario == 0
    assert all(search.num_targets <= 5 for search in result.searches)
    better = scenario(state, 600, 2)[1]
    assert plan_shared_capture([*two, better]).scenario == 2
    starved = plan_shared_capture(two, max_targets=0)  # at least one target each
    assert all(search.num_targets <= 1 for search in starved.searches)


def test_capture_candidate_needs_one_page_per_unaligned_pool():  # COW-04, COW-05
    capacity = make_capacity(device_state_slots=4, device_pages=(10, 10), lanes=1)
    assert capture_candidate(capacity, (130, 128)).request.capacity_tokens == (64, 0)
