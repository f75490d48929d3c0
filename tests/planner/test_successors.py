"""Degradation is monotone, complete and ordered by help; joint releases are offered (T-5, T-6, G-1, G-7)."""

import random

import numpy as np
import pytest

from ninfer_jax.planner.candidate import make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.operations import CheckpointSpec, add_owner
from ninfer_jax.planner.options import make_templates, refines
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import identity_targets, make_problem, maximal_targets
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.successors import make_successor_tables, successors
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, take, target_keys


def random_problem(naive, seed):
    rng = random.Random(seed)
    state = naive.random_state(seed, apply=apply, make_problem=make_problem)
    return make_problem(state, naive.random_candidates(state, rng)), rng


@pytest.mark.parametrize("seed", range(40))
def test_refinement_is_a_strict_partial_order(naive, seed):
    problem, _ = random_problem(naive, seed)
    order = refines(problem.options)
    for v in range(problem.num_victims):
        r = order[v]
        assert not np.diag(r).any()
        assert not (r & r.T).any()
        reach = (r.astype(np.int32) @ r.astype(np.int32)) > 0
        assert not (reach & ~r).any(), f"owner {v} is not transitive"
        assert r[KEEP, EVICT]
        assert not r[EVICT].any()
        valid = np.flatnonzero(problem.options.valid[v])
        assert all(k == KEEP or r[KEEP, k] for k in valid)  # everything is reachable from identity


@pytest.mark.parametrize("seed", range(40))
def test_successors_only_degrade(naive, seed):
    """No axis of a successor ends higher on Device; checkpoints only disappear."""
    problem, rng = random_problem(naive, seed)
    if not problem.num_victims:
        return
    tables = make_successor_tables(problem)
    targets = naive.random_targets(problem, rng, 2)
    for b in range(2):
        one = take(targets, np.array([b]))
        following = successors(tables, one, residual=np.ones_like(problem.tables.used0))
        before, after = assess_numpy(problem, one), assess_numpy(problem, following)
        pages = slice(3, None)
        assert (after.drops >= before.drops[0]).all()
        for rows in (
            after.used[:, -1, 0] <= before.used[0, -1, 0],
            after.used[:, -1, pages] <= before.used[0, -1, pages],
        ):
            assert rows.all()
        assert (following.codes != one.codes).any(1).all()
        source = one.codes[0] == ABSENT
        assert (following.codes[:, source] == ABSENT).all()
        assert not (following.codes[:, ~source] == ABSENT).any()
        keys = target_keys(following)
        single = (following.codes != one.codes).sum(1) == 1
        assert len({k for k, s in zip(keys, single, strict=True) if s}) == single.sum()


def shared_pages():
    state = make_state(make_capacity(device_state_slots=9, device_pages=20))
    state, s = add_owner(state, [CheckpointSpec(320)], kind=OwnerKind.SHARED)
    state, x = add_owner(state, [CheckpointSpec(320)], share_with=s, share_tokens=320)
    state, y = add_owner(state, [CheckpointSpec(128)])
    return make_problem(state, [root_candidate(make_request(64 * 19, 0))]), s, x, y


def test_helpful_first_but_nothing_is_left_out():  # T-6, G-1
    problem, s, x, y = shared_pages()
    tables = make_successor_tables(problem)
    identity = take(identity_targets(problem), np.array([0]))
    residual = assess_numpy(problem, identity).residual[0]
    assert residual.tolist() == [0, 0, 0, 6]
    got = successors(tables, identity, residual=residual)
    joint = [set(np.flatnonzero(c == EVICT)) for c in got.codes]
    assert joint[0] == {s, x}  # five shared pages that neither frees alone
    assert {y} in joint
    assert {s} in joint and {x} in joint  # useless alone, still offered
    assert joint.index({y}) < joint.index({s})
    assert len(successors(tables, identity, residual=residual, limit=2)) == 2


def test_licence_forbids_eviction_outside_it():  # G-7
    problem, s, x, y = shared_pages()
    tables = make_successor_tables(problem)
    identity = take(identity_targets(problem), np.array([0]))
    licensed = np.array([False, False, True])
    got = successors(tables, identity, residual=np.ones(4, np.int32), licensed=licensed)
    assert not (got.codes[:, [s, x]] == EVICT).any()
    assert (got.codes[:, y] == EVICT).any()


def test_maximal_has_no_successor(naive):
    problem, _ = random_problem(naive, 3)
    tables = make_successor_tables(problem)
    last = take(maximal_targets(problem), np.array([0]))
    assert len(successors(tables, last, residual=np.ones_like(problem.tables.used0))) == 0


def test_templates_start_with_the_fixed_codes():
    for m in (1, 2, 3, 8):
        templates = make_templates(m, 64)
        assert len(set(templates[2:])) == len(templates) - 2
        assert len(templates) <= 64
    with pytest.raises(ValueError, match="at least 3"):
        make_templates(2, 2)
