"""Bit-identity of any batch size, compiled or not (T-7); the doctests and the import rules."""

import ast
import doctest
import importlib
import pkgutil
import random
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from ninfer_jax import planner
from ninfer_jax.planner.holders import make_holdings
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.projection import assess, assess_numpy, project_batch
from ninfer_jax.planner.sparse_projection import assess_sparse, make_sparse_tables
from ninfer_jax.planner.successors import make_successor_tables, successors
from ninfer_jax.planner.target import take

PHYSICAL = [
    "ids", "capacity", "extents", "state", "rows", "operations", "invariants", "work", "candidate",
    "target", "options", "option_sizes", "lineage", "holders", "contributions", "sources", "needs",
    "tables", "problem", "identity", "projection", "stages", "resolution", "outcomes", "successors",
    "search_types", "functions", "plan", "transition", "readiness", "backfill", "cells",
    "class_patterns", "sparse_projection",
]  # fmt: skip
VALUE = {"cost", "portfolio", "round_facts", "savings", "losses", "search", "shared_capture"}
BANNED = {"time", "random", "logging", "flax", "orbax", "jax.experimental", "jax.random", "numpy.random"}


def rows_of(assessment, rows):
    return jax.tree.map(lambda a: a[rows], assessment)


def test_rows_do_not_depend_on_the_batch(naive):
    """B in {1, 5, 40} and NumPy give the same bits; other rows of the batch do not matter."""
    rng = random.Random(11)
    state = naive.random_state(17, apply=apply, make_problem=make_problem)
    problem = make_problem(state, naive.random_candidates(state, rng))
    targets = naive.random_targets(problem, rng, 40)
    reference = assess_numpy(problem, targets)
    chex.assert_trees_all_equal(assess(problem, targets), reference)
    order = np.array(rng.sample(range(40), 40))
    chex.assert_trees_all_equal(assess(problem, take(targets, order)), rows_of(reference, order))
    for size in (1, 5):
        some = order[:size]
        chex.assert_trees_all_equal(assess(problem, take(targets, some)), rows_of(reference, some))
        chex.assert_trees_all_equal(assess_numpy(problem, take(targets, some)), rows_of(reference, some))
    with jax.disable_jit():
        chex.assert_trees_all_equal(assess(problem, take(targets, order[:3])), rows_of(reference, order[:3]))


def test_identities_are_assessed_without_tables(naive):
    """The short way of G-2 gives the projection's bits and builds no pressure domain."""
    for seed in range(25):
        rng = random.Random(seed)
        state = naive.random_state(seed, apply=apply, make_problem=make_problem)
        problem = make_problem(state, naive.random_candidates(state, rng), holdings=make_holdings(state))
        identities = planner.identity_targets(problem)
        got = assess_numpy(problem, identities)
        assert "_pressure" not in vars(problem)
        chex.assert_trees_all_equal(got, assess(problem, identities))
        reverse = np.arange(len(identities))[::-1]
        chex.assert_trees_all_equal(assess_numpy(problem, take(identities, reverse)), rows_of(got, reverse))


def test_neighbours_are_assessed_from_their_differences(naive):
    """`assess_sparse` gives the projection's bits for any batch: scattered targets and neighbourhoods."""
    for seed in range(20):
        rng = random.Random(seed)
        state = naive.random_state(seed, apply=apply, make_problem=make_problem)
        problem = make_problem(state, naive.random_candidates(state, rng))
        sparse = make_sparse_tables(problem)
        targets = naive.random_targets(problem, rng, 30)
        around = successors(
            make_successor_tables(problem),
            take(targets, slice(0, 1)),
            residual=np.zeros_like(problem.tables.used0),
        )
        for batch in (targets, take(targets, slice(0, 1)), take(targets, slice(0, 2)), around):
            if len(batch):
                chex.assert_trees_all_equal(assess_sparse(sparse, batch), assess_numpy(problem, batch))


def test_holdings_of_another_state_are_refused(naive):
    one, other = (naive.random_state(s, apply=apply, make_problem=make_problem) for s in (1, 2))
    with pytest.raises(ValueError, match=r"call make_holdings\(state\) after every change"):
        make_problem(one, [planner.root_candidate(planner.make_request(1, 0))], holdings=make_holdings(other))


def test_one_trace_per_bucket(naive):
    rng = random.Random(12)
    state = naive.random_state(18, apply=apply, make_problem=make_problem)
    problem = make_problem(state, naive.random_candidates(state, rng))
    assess(problem, naive.random_targets(problem, rng, 7))
    before = project_batch._cache_size()
    for size in (2, 9, 32):
        assess(problem, naive.random_targets(problem, rng, size))
    assert project_batch._cache_size() == before


def test_states_are_pytrees_that_compare(naive):
    a = naive.random_state(4, apply=apply, make_problem=make_problem)
    b = naive.random_state(4, apply=apply, make_problem=make_problem)
    chex.assert_trees_all_equal(a, b)  # the same legal operations give the same state
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(a, naive.random_state(5, apply=apply, make_problem=make_problem))


def test_targets_of_another_problem_are_refused(naive):
    state, _ = planner.add_owner(
        planner.make_state(planner.make_capacity(device_state_slots=2, device_pages=4)),
        [planner.CheckpointSpec(64)],
    )
    problem = make_problem(state, [planner.root_candidate(planner.make_request(1, 0))])
    with pytest.raises(ValueError, match="live only within one problem"):
        assess_numpy(problem, planner.make_targets(0, np.zeros((1, 3), np.int32)))


def modules():
    return sorted(m.name for m in pkgutil.iter_modules(planner.__path__))


@pytest.mark.parametrize("name", ["__init__", *PHYSICAL])
def test_doctests(name):
    module = planner if name == "__init__" else importlib.import_module(f"ninfer_jax.planner.{name}")
    assert doctest.testmod(module).failed == 0


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("name", PHYSICAL)
def test_physical_half_never_imports_the_value_half(name):  # O-1 as an import rule
    path = Path(planner.__file__).with_name(f"{name}.py")
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "ninfer_jax":
            assert parts[1] == "planner" and parts[2] not in VALUE, f"{name} imports {module}"
        assert not any(module == b or module.startswith(b + ".") for b in BANNED), f"{name} imports {module}"
        assert module not in ("jax.device_put", "jax.devices"), f"{name} imports {module}"
