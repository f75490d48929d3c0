"""The Host arena against a bitmap, and the geometry scenarios GEO-*."""

import random

import numpy as np
import pytest

from ninfer_jax.planner.candidate import make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.extents import (
    Blocked,
    Placed,
    allocate,
    free_granules,
    largest_hole,
    make_arena,
    place,
    release,
    take_intervals,
)
from ninfer_jax.planner.ids import OwnerKind, Tier
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.operations import CheckpointSpec, add_owner, evict, set_pin
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.resolution import confirm
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import KEEP, make_targets


def first_fit(bitmap, length):
    """The oracle: first position with `length` free cells in a row."""
    for start in range(len(bitmap) - length + 1):
        if not bitmap[start : start + length].any():
            return start
    return None


@pytest.mark.parametrize("seed", range(60))
def test_arena_agrees_with_a_bitmap(seed):  # K-7
    rng = random.Random(seed)
    size = rng.randint(1, 60)
    arena, bitmap, live = make_arena(size), np.zeros(size, bool), []
    for _ in range(60):
        if live and rng.random() < 0.4:
            start, length = live.pop(rng.randrange(len(live)))
            cut = rng.randint(0, length - 1)  # part of an extent may go, as whole packed pages
            arena = release(arena, [(start + cut, length - cut)])
            bitmap[start + cut : start + length] = False
            if cut:
                live.append((start, cut))
        else:
            length = rng.randint(1, 9)
            got, want = allocate(arena, length), first_fit(bitmap, length)
            assert (got is None) == (want is None)
            if got is not None:
                arena, start = got
                assert start == want
                bitmap[start : start + length] = True
                live.append((start, length))
        assert free_granules(arena) == int((~bitmap).sum())
        assert arena == make_arena(size, [(i, 1) for i in np.flatnonzero(bitmap)])
        holes = [len(h) for h in "".join("x" if b else "." for b in bitmap).split("x")]
        assert largest_hole(arena) == max(holes)


def test_place_is_all_or_nothing_and_exact():
    arena = make_arena(10, [(3, 1), (6, 1)])
    assert place(arena, [], [3, 3]) == Placed(make_arena(10, [(0, 4), (6, 4)]), (0, 7))
    assert place(arena, [(3, 1)], [6]) == Placed(make_arena(10, [(0, 7)]), (0,))
    blocked = place(arena, [], [3, 4])
    assert isinstance(blocked, Blocked)
    assert (blocked.index, blocked.needed, blocked.largest) == (1, 4, 3)
    assert take_intervals(arena, [(0, 3)]) == make_arena(10, [(0, 4), (6, 1)])


def test_double_release_is_an_error():
    with pytest.raises(ValueError, match="already free"):
        release(make_arena(4, [(0, 2)]), [(1, 2)])
    with pytest.raises(ValueError, match="outside"):
        release(make_arena(4, [(0, 4)]), [(3, 2)])


def fragmented(pages):
    """100 granules with pinned extents at [30, 40) and [60, 70); X is Device-only with `pages` pages."""
    state = make_state(
        make_capacity(
            device_state_slots=9,
            host_state_slots=9,
            device_pages=40,
            host_kv_granules=100,
            page_granules=(10,),
            lanes=2,
        )
    )
    state, filler = add_owner(state, [CheckpointSpec(64 * 3)], kv_tier=Tier.HOST)
    state, p1 = add_owner(state, [CheckpointSpec(64)], kv_tier=Tier.HOST)
    state, gap = add_owner(state, [CheckpointSpec(64 * 2)], kv_tier=Tier.HOST)
    state, p2 = add_owner(state, [CheckpointSpec(64)], kv_tier=Tier.HOST)
    state = evict(evict(state, filler), gap)
    state, x = add_owner(state, [CheckpointSpec(64 * pages)])
    for pinned in (p1, p2):
        state = set_pin(state, pinned, pins=1)
    check_invariants(state)
    return state, x


@pytest.mark.parametrize(("pages", "feasible"), [(4, False), (3, True)])
def test_geo_01_enough_bytes_no_extent(pages, feasible):
    state, x = fragmented(pages)
    assert free_granules(state.arena) == 80
    assert largest_hole(state.arena) == 30
    problem = make_problem(state, [root_candidate(make_request(10, 0))])
    assert problem.victims.tolist() == [x]
    demote_kv = next(
        k
        for k, t in enumerate(problem.options.templates)
        if (t.survivors, t.state, t.kv, t.kv_extent) == (0, 0, 3, 0)
    )
    target = make_targets(0, np.array([demote_kv]))
    assessment = assess_numpy(problem, target)
    assert assessment.fits[0]  # byte totals cannot tell
    answer = confirm(problem, target, assessment)
    assert answer.ok is feasible
    if not feasible:
        assert answer.residual[2] == 10  # the hole is one page short


def test_geo_03_last_reference_gives_exact_contiguous_credit():
    state = make_state(
        make_capacity(device_state_slots=9, device_pages=40, host_state_slots=9, host_kv_granules=8)
    )
    state, x = add_owner(state, [CheckpointSpec(64 * 5)], kv_tier=Tier.HOST)
    state, y = add_owner(state, [CheckpointSpec(64 * 5)], share_with=x, share_tokens=64 * 5)
    state, spacer = add_owner(state, [CheckpointSpec(64 * 2)], kv_tier=Tier.HOST)
    state, e2 = add_owner(state, [CheckpointSpec(64)], kv_tier=Tier.HOST, kind=OwnerKind.SHARED)
    state = set_pin(evict(state, spacer), e2, pins=1)
    assert state.arena.free == ((5, 2),)
    only_x = evict(state, x)
    assert only_x.arena.free == ((5, 2),)
    both = evict(only_x, y)
    assert allocate(both.arena, 7) is not None
    assert allocate(both.arena, 8) is None


def test_shared_prefix_of_a_target_keeps_its_bytes_until_the_last_holder_goes():
    """The same as GEO-03 through a target: KEEP of one holder is enough to keep the extent."""
    state = make_state(
        make_capacity(device_state_slots=9, device_pages=40, host_state_slots=9, host_kv_granules=8)
    )
    state, x = add_owner(state, [CheckpointSpec(64 * 5)], kv_tier=Tier.HOST)
    state, _ = add_owner(state, [CheckpointSpec(64 * 5)], share_with=x, share_tokens=64 * 5)
    problem = make_problem(state, [root_candidate(make_request(10, 0))])
    got = assess_numpy(problem, make_targets(0, np.array([[KEEP, 2], [2, 2]])))
    assert got.used[:, 1, 2].tolist() == [5, 0]
