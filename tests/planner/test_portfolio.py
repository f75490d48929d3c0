"""Savings, empirical value, loss and J: the scenarios' numbers, and equality with a naive valuation."""

import doctest
import random

import numpy as np
import pytest

from ninfer_jax.planner import portfolio as subject
from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.cost import (
    GENERIC_CPU,
    GENERIC_GPU,
    Q32,
    SATURATED,
    MachineCostModel,
    PrefillModel,
    TransferCoefficients,
    TransferModel,
    work_ns,
)
from ninfer_jax.planner.demand import Demand, Portfolio, commit_demand, grant_credit
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind, Tier
from ninfer_jax.planner.operations import CheckpointSpec, add_owner
from ninfer_jax.planner.outcomes import checkpoint_outcomes, make_outcome_tables, recoveries
from ninfer_jax.planner.portfolio import (
    Retention,
    empirical_value,
    make_facts,
    make_value,
    net_gain,
    private_loss,
    saving,
)
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import identity_targets, make_problem, maximal_targets
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import EVICT, concatenate, make_targets, take
from ninfer_jax.planner.transition import immediate_work

FREE = TransferCoefficients(0, 0, 0)
PER_BYTE = TransferCoefficients(0, 0, Q32)
UNIT = MachineCostModel(TransferModel(PER_BYTE, PER_BYTE, FREE), PrefillModel(0, Q32, 0, 0, 0))


def ints(*numbers):
    return np.asarray(numbers, np.int64)


def test_val_03_nested_prefixes_count_once_per_record():  # O-6
    matches = np.array([[1, 1], [1, 1], [1, 0]], bool)
    assert empirical_value(ints(300, 500, 900), matches) == 900 + 500


def test_two_nested_checkpoints_lose_once():
    matches = np.ones((2, 1), bool)
    assert empirical_value(ints(800, 500), matches) - empirical_value(ints(0, 500), matches) == 300


def test_val_09_private_loss_is_the_worst_checkpoint_times_weight():  # O-7
    assert private_loss(Retention.RECENT_PRIVATE, ints(1000, 700, 400), ints(1000, 0, 0)) == 2800
    assert private_loss(Retention.LIVE_SESSION, ints(10), ints(20)) == 0


def test_val_10_losses_of_different_owners_add():
    assert private_loss(1, ints(300), ints(0)) + private_loss(4, ints(100), ints(0)) == 700


def test_val_12_equal_net_gain_keeps_the_baseline():  # O-10
    assert net_gain(0, 2 * 500, 4 * 250, 0, 0) == 0
    assert net_gain(0, 2 * 500, 4 * 249, 0, 0) == 4


def test_immediate_delta_counts_everybody_who_waits():
    assert net_gain(0, 1000, 0, 50, 150, blocked_requests=2) == 1000 - 3 * 100
    assert net_gain(0, 1000, 0, 150, 50, blocked_requests=2) == 1000  # a cheaper transition is no gain
    assert net_gain(0, 1000, 0, 0, 0, split_ns=400) == 600


@pytest.mark.parametrize("position", range(5))
def test_saturation_never_proves_a_gain(position):  # O-13
    numbers = [0, 10, 0, 0, 0]
    numbers[position] = SATURATED
    assert net_gain(*numbers) is None


def test_val_19_saving_takes_the_cheapest_recipe():  # O-5
    rebuild = 900
    assert [saving(rebuild, min(x)) for x in ((5, 120, 900), (120, 900), (900,))] == [895, 780, 0]
    assert saving(900, 901) == 0


# ---------------------------------------------------------------- worked rounds under the unit model


def state_of(h=8, host_states=8, host_pages=100):
    return make_state(
        make_capacity(
            device_state_slots=1 + h,
            device_pages=200,
            host_state_slots=host_states,
            host_kv_granules=host_pages,
            granule_bytes=10,
            state_image_bytes=100,
        )
    )


def round_of(state, candidates=None, **facts):
    """Returns problem and value of a round."""
    problem = make_problem(state, candidates or [root_candidate(make_request(64, 0))])
    return problem, make_value(problem, make_facts(problem, **facts), UNIT)


def evicting(problem, *owners):
    codes = np.zeros(problem.num_victims, np.int32)
    codes[[int(np.flatnonzero(problem.victims == o)[0]) for o in owners]] = EVICT
    return make_targets(0, codes)


def test_val_21_a_surviving_private_checkpoint_covers_a_lost_shared_one():
    state = state_of()
    state, s = add_owner(state, [CheckpointSpec(300)], kind=OwnerKind.SHARED)
    state, x = add_owner(state, [CheckpointSpec(900)])
    keys = {0: "s", 1: "x"}
    demands = commit_demand(Portfolio(), Demand("q", frozenset(["s", "x"])))
    problem, value = round_of(state, portfolio=demands, keys=keys)
    everything = concatenate([evicting(problem), evicting(problem, s), evicting(problem, x, s)])
    public = value.public_value(everything).tolist()
    assert [public[0] - p for p in public] == [0, 0, 900]
    assert value.private_losses(everything).tolist() == [0, 0, 4 * 900]
    assert value.future(everything).tolist() == [0, 0, 900 + 3600]


def test_val_05_credit_is_the_largest_saving_of_its_owner():  # O-8, design 6
    state = state_of()
    state, s = add_owner(state, [CheckpointSpec(300)], kind=OwnerKind.SHARED)
    with_credit = grant_credit(Portfolio(), s, ["s"])
    matched = commit_demand(with_credit, Demand("q", frozenset(["s"])))
    assert matched.credits == ()
    for portfolio, keys, worth in ((with_credit, {0: "s"}, 300), (matched, {}, 0), (matched, {0: "s"}, 300)):
        problem, value = round_of(state, portfolio=portfolio, keys=keys)
        assert value.public_value(evicting(problem)).tolist() == [worth]
        assert value.public_value(evicting(problem, s)).tolist() == [0]


def test_val_14_a_consumed_source_is_no_loss():  # O-11
    state = state_of()
    specs = [CheckpointSpec(256), CheckpointSpec(128, CheckpointKind.TURN_CLOSURE)]
    state, _ = add_owner(state, specs)
    request = make_request(300, 0)
    endpoint = int(np.flatnonzero(state.checkpoint_kind == CheckpointKind.SESSION_ENDPOINT)[0])
    candidates = [root_candidate(request), Candidate(1, endpoint, Disposition.CONSUME, request)]
    problem, value = round_of(state, candidates)
    assert value.future(identity_targets(problem)).tolist() == [0, 0]
    assert value.future(take(maximal_targets(problem), np.array([0]))).tolist() == [4 * 256]
    assert value.future(take(maximal_targets(problem), np.array([1]))).tolist() == [0]


def test_plan_22_prices_of_host_only_sources():
    state = state_of()
    request = make_request(600, 0)
    for frontier, total in ((64, 110 + 536), (384, 160 + 216)):
        there, _ = add_owner(
            state,
            [CheckpointSpec(frontier)],
            kind=OwnerKind.SHARED,
            kv_tier=Tier.HOST,
            state_tier=Tier.HOST,
        )
        problem, value = round_of(
            there, [root_candidate(request), Candidate(1, 0, Disposition.RETAIN, request)]
        )
        identities = identity_targets(problem)
        assert value(identities, assess_numpy(problem, identities)).tolist() == [600, total]


def test_demotion_costs_the_copy_now_and_the_restore_later():
    state = state_of()
    state, _ = add_owner(state, [CheckpointSpec(256)])
    problem, value = round_of(state)
    code = next(
        k for k, t in enumerate(problem.options.templates) if (t.survivors, t.state, t.kv) == (0, 3, 3)
    )
    target = make_targets(0, np.array([code]))
    got = value.now(target, assess_numpy(problem, target)), value.future(target)
    assert [int(x[0]) for x in got] == [64 + 140, 4 * 140]


def test_saturated_loss_is_the_maximum_only_when_something_was_degraded():  # O-13
    endless = MachineCostModel(UNIT.transfer, PrefillModel(SATURATED, SATURATED, 0, 0, 0))
    state = state_of()
    state, x = add_owner(state, [CheckpointSpec(256)])
    problem = make_problem(state, [root_candidate(make_request(64, 0))])
    value = make_value(problem, make_facts(problem), endless)
    both = concatenate([evicting(problem), evicting(problem, x)])
    assert value.future(both).tolist() == [0, SATURATED]
    assert value(both, assess_numpy(problem, both)).tolist() == [SATURATED, SATURATED]


def test_tie_keys_follow_the_facts():  # O-12
    state = state_of()
    state, x = add_owner(state, [CheckpointSpec(256)])
    state, y = add_owner(state, [CheckpointSpec(256)])
    problem, value = round_of(state, hits={1: (3, 17)})
    targets = concatenate([evicting(problem, x), evicting(problem, y), evicting(problem, x, y)])
    keys = value.tie_break(targets, assess_numpy(problem, targets))
    assert keys[:, :2].tolist() == [[0, 0], [1, 17], [1, 17]]
    assert keys[:, 2:4].tolist() == [[1, 1], [1, 1], [2, 2]]


# ---------------------------------------------------------------- against a naive valuation


def naive_round(problem, outcome, facts, model, targets):
    """J and its parts over Python ints, checkpoint by checkpoint, from the enumerated recipes."""
    state = problem.state
    identities = identity_targets(problem)

    def recovered(outcomes, row, c):
        best = SATURATED
        for recipe in recoveries(problem, outcomes, row, c):
            price = work_ns(model, recipe.work)
            if recipe.start is not None:
                price += recovered(outcomes, row, recipe.start)
            best = min(best, price)
        return best

    def savings(batch, row):
        outcomes = checkpoint_outcomes(problem, outcome, take(batch, np.array([row])))
        out = []
        for c in problem.checkpoints:
            rebuild = work_ns(model, recoveries(problem, outcomes, 0, int(c))[-1].work)
            out.append(saving(rebuild, recovered(outcomes, 0, int(c))))
        return ints(*out)

    def public(worth):
        credit = 0
        owner = state.checkpoint_owner[problem.checkpoints]
        for o in np.flatnonzero(facts.credited):
            credit += int(worth[owner == o].max(initial=0))
        return empirical_value(worth, facts.matches) + credit

    got = []
    assessment = assess_numpy(problem, targets)
    for b in range(len(targets)):
        which = int(targets.candidate[b])
        before, after = savings(identities, which), savings(targets, b)
        owner = state.checkpoint_owner[problem.checkpoints]
        loss = sum(
            private_loss(int(facts.weights[o]), before[owner == o], after[owner == o]) for o in set(owner)
        )
        future = max(0, public(before) - public(after)) + loss
        got.append((work_ns(model, immediate_work(problem, which, assessment, b)), future))
    return got


@pytest.mark.parametrize("seed", range(24))
def test_tables_equal_the_naive_valuation(naive, seed):  # O-5..O-9, shared classes included
    rng = random.Random(seed)
    state = naive.random_state(seed, apply=apply, make_problem=make_problem)
    problem = make_problem(state, naive.random_candidates(state, rng))
    model = rng.choice([UNIT, GENERIC_GPU, GENERIC_CPU])
    names = ["a", "b", "c", "d"]
    demands = Portfolio()
    for i in range(rng.randint(0, 6)):
        demands = commit_demand(demands, Demand(i, frozenset(rng.sample(names, rng.randint(0, 3)))))
    for o in np.flatnonzero(state.owner_kind == OwnerKind.SHARED):
        if rng.random() < 0.5:
            demands = grant_credit(demands, int(o), [f"own{o}"])
    facts = make_facts(
        problem,
        portfolio=demands,
        keys={int(c): rng.choice([*names, None]) for c in problem.checkpoints},
        retention={int(o): rng.choice(list(Retention)) for o in problem.victims},
    )
    outcome = make_outcome_tables(problem)
    targets = concatenate([identity_targets(problem), naive.random_targets(problem, rng, 8)])
    value = make_value(problem, facts, model)
    assessment = assess_numpy(problem, targets)
    got = list(zip(value.now(targets, assessment).tolist(), value.future(targets).tolist(), strict=True))
    assert got == naive_round(problem, outcome, facts, model, targets)
    assert value(targets, assessment).tolist() == [a + b for a, b in got]


def test_rows_do_not_depend_on_the_batch(naive):  # T-7 for the value half
    rng = random.Random(5)
    state = naive.random_state(5, apply=apply, make_problem=make_problem)
    problem = make_problem(state, naive.random_candidates(state, rng))
    targets = naive.random_targets(problem, rng, 40)
    facts = make_facts(problem)
    whole = make_value(problem, facts, GENERIC_GPU).future(targets)
    single = make_value(problem, facts, GENERIC_GPU)
    assert [int(single.future(take(targets, np.array([b])))[0]) for b in range(40)] == whole.tolist()


def test_doctests():
    assert doctest.testmod(subject).failed == 0
