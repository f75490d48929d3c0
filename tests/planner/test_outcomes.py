"""Checkpoint fates against the set oracle, and the recovery recipes (O-5)."""

import random

import jax
import numpy as np
import pytest

from ninfer_jax.planner.candidate import make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.ids import CheckpointKind, Tier
from ninfer_jax.planner.operations import CheckpointSpec, add_owner
from ninfer_jax.planner.outcomes import checkpoint_outcomes, make_outcome_tables, recoveries
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import identity_targets, make_problem
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import EVICT, concatenate, make_targets
from ninfer_jax.planner.work import Direction, Phase, PrefillWork, TransferWork


@pytest.mark.parametrize("block", range(4))
def test_outcomes_agree_with_sets(naive, block):
    compared = 0
    for seed in range(block * 15, block * 15 + 15):
        rng = random.Random(seed + 5)
        state = naive.random_state(seed, apply=apply, make_problem=make_problem)
        problem = make_problem(state, naive.random_candidates(state, rng))
        tables = make_outcome_tables(problem)
        targets = concatenate([identity_targets(problem), naive.random_targets(problem, rng, 5)])
        got = checkpoint_outcomes(problem, tables, targets)
        if seed % 15 == 0:
            again = checkpoint_outcomes(problem, tables, targets, compiled=True)
            jax.tree.map(np.testing.assert_array_equal, got, again)
        for b in range(len(targets)):
            which, codes = int(targets.candidate[b]), targets.codes[b]
            end = naive.naive_assess(problem, which, codes)["final_device"]
            for q, c in enumerate(problem.checkpoints):
                want = naive.naive_outcomes(problem, which, codes, end)[int(c)]
                where = f"seed {seed}, candidate {which}, codes {codes.tolist()}, checkpoint {c}"
                assert bool(got.alive[b, q]) == want[0], where
                if want[0]:
                    assert bool(got.state_on_device[b, q]) == want[1], where
                    assert got.h2d_pages[b, q].tolist() == want[2], where
                    assert int(got.h2d_ops[b, q]) == want[3], where
                    compared += 1
    assert compared > 250


def test_recoveries_are_restore_interval_and_rebuild():  # O-5
    capacity = make_capacity(
        device_state_slots=4,
        device_pages=40,
        host_state_slots=4,
        host_kv_granules=40,
        granule_bytes=10,
        state_image_bytes=100,
    )
    state, x = add_owner(
        make_state(capacity),
        [CheckpointSpec(300), CheckpointSpec(128, CheckpointKind.TURN_CLOSURE)],
        kv_tier=Tier.HOST,
        state_tier=Tier.HOST,
    )
    problem = make_problem(state, [root_candidate(make_request(10, 0))])
    tables = make_outcome_tables(problem)
    end, closure = (int(c) for c in sorted(problem.checkpoints, key=lambda c: -state.checkpoint_frontier[c]))
    keep = checkpoint_outcomes(problem, tables, identity_targets(problem))
    restore, interval, root = recoveries(problem, keep, 0, end)
    # image, pages [0, 2), [2, 4), tail page: four copies, 100 + 5 * 10 bytes; then one tail copy on Device
    assert restore.work.transfers == (
        TransferWork(Phase.CANDIDATE, Direction.H2D, 4, 150),
        TransferWork(Phase.CANDIDATE, Direction.D2D, 1, 10),
    )
    assert interval.start == closure
    assert interval.work.prefill == PrefillWork(1, 172, 128 * 172 + 172 * 173 // 2)
    assert root.work.prefill == PrefillWork(1, 300, 300 * 301 // 2)
    gone = checkpoint_outcomes(problem, tables, make_targets(0, np.array([EVICT])))
    assert [r.start for r in recoveries(problem, gone, 0, end)] == [None]
    with pytest.raises(ValueError, match="not live"):
        recoveries(problem, keep, 0, 99)
    assert x == 0
