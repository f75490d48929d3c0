"""Projection (NumPy, compiled, any batch) and exact resolution against sets of page objects."""

import random

import jax
import numpy as np
import pytest

from ninfer_jax.planner.extents import Placed
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import identity_targets, make_problem, maximal_targets
from ninfer_jax.planner.projection import assess, assess_numpy
from ninfer_jax.planner.resolution import When, place_recipe, resolve
from ninfer_jax.planner.state import used
from ninfer_jax.planner.target import concatenate, take


def check_one_state(naive, seed, num_targets, compiled):
    """Compares every quantity of random targets of one random state; returns how many were compared."""
    rng = random.Random(seed * 7919 + 1)
    state = naive.random_state(seed, apply=apply, make_problem=make_problem)
    check_invariants(state)
    problem = make_problem(state, naive.random_candidates(state, rng))
    assert problem.tables.used0.tolist() == used(state).tolist()
    targets = concatenate(
        [
            identity_targets(problem),
            maximal_targets(problem),
            naive.random_targets(problem, rng, num_targets),
        ]
    )
    got = assess_numpy(problem, targets)
    if compiled:
        jax.tree.map(np.testing.assert_array_equal, got, assess(problem, targets))
    for b in range(len(targets)):
        want = naive.naive_assess(problem, int(targets.candidate[b]), targets.codes[b])
        where = (
            f"seed {seed}, target {b}: candidate {targets.candidate[b]}, codes {targets.codes[b].tolist()}"
        )
        np.testing.assert_array_equal(got.used[b], want["used"], err_msg=where)
        np.testing.assert_array_equal(got.peak[b], want["peak"], err_msg=where)
        for name in ("d2h", "h2d", "d2d"):
            np.testing.assert_array_equal(getattr(got, name)[b], want[name], err_msg=f"{name} {where}")
        for name in ("is_fork", "evictions", "drops"):
            assert getattr(got, name)[b] == want[name], f"{name} {where}"
        one = take(targets, np.array([b]))
        exact = resolve(problem, one)
        _check_resolution(exact, got, b, where)
        if b % 4 == 0 and got.fits[b] and isinstance(place_recipe(problem, exact)[1], Placed):
            after, owner = apply(problem, one)
            check_invariants(after)
            np.testing.assert_array_equal(used(after), got.used[b, -1], err_msg=where)
            assert after.revision == state.revision + 1
            assert after.owner_kind[owner] == OwnerKind.ACTIVE
    return len(targets)


def _check_resolution(exact, got, b, where):
    items = got.d2h.shape[1]
    d2h, ops, h2d = np.zeros(items, int), np.zeros(items, int), np.zeros(items, int)
    host_now = np.zeros(items, int)
    for p in exact.pieces:
        d2h[p.item] += p.size * p.copies_d2h
        ops[p.item] += p.copies_d2h
        h2d[p.item] += p.size * p.restores_h2d
        host_now[p.item] += p.size * (p.frees_host == When.NOW)
    assert d2h.tolist() == got.d2h[b].tolist(), where
    assert ops.tolist() == got.d2h_ops[b].tolist(), where
    for pool, _, from_host in exact.tail_copies:
        h2d[pool + 1] += from_host
    assert h2d[1:].tolist() == got.h2d[b, 1:].tolist(), where
    assert exact.forks == got.is_fork[b], where
    assert len(exact.evicted) == got.evictions[b], where
    assert len(exact.dropped) == got.drops[b], where
    assert host_now[0] == got.used[b, 0, 1] - got.used[b, 1, 1], where


@pytest.mark.parametrize("block", range(6))
def test_random_states_agree_with_sets(naive, block):
    """T-3, T-7, R-8, R-9, R-10: 240 random states, about 3,000 targets."""
    for seed in range(block * 40, block * 40 + 40):
        check_one_state(naive, seed, 5, compiled=seed % 10 == 0)


@pytest.mark.slow
def test_many_random_states_agree_with_sets(naive):
    """The long run: 2,000 further states with 12 random targets each."""
    targets = sum(check_one_state(naive, seed, 12, compiled=seed % 25 == 0) for seed in range(1000, 3000))
    assert targets > 24_000
