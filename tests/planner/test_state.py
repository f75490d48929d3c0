"""Legal operations keep every invariant; occupancy against sets; the exclusive view; refusals (R-4..R-7)."""

import random

import numpy as np
import pytest

from ninfer_jax.planner.candidate import make_request
from ninfer_jax.planner.capacity import axis_names, make_capacity, residual
from ninfer_jax.planner.extents import Placed
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind, Tier
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.operations import (
    CheckpointSpec,
    activate_root,
    add_owner,
    advance,
    capture,
    drop_checkpoint,
    evict,
    finish,
    settle_fork,
    truncate,
)
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import identity_targets, make_problem
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.resolution import place_recipe, resolve
from ninfer_jax.planner.state import (
    checkpoint_ref,
    checkpoints_of,
    eligible,
    exclusive,
    make_state,
    space,
    used,
)
from ninfer_jax.planner.target import take


def sets_used(naive, state):
    w = naive.World(state)
    reserved = [int(state.owner_reserved_pages[:, n].sum()) for n in range(w.pools)]
    return w.used(w.device, w.host, reserved, int(state.owner_reserved_states.sum()))


def actives_of(state):
    return [int(o) for o in np.flatnonzero(state.owner_kind == OwnerKind.ACTIVE)]


def step(naive, state, rng):
    """One random legal operation; returns the state and whether R-11 asks for a new revision."""
    actives = actives_of(state)
    idle = [int(o) for o in np.flatnonzero(eligible(state))]
    roll = rng.random()
    if roll < 0.15 and len(actives) < 4:
        return activate_root(state, rng.randint(1, 500))[0], True
    if roll < 0.45 and actives:
        a = rng.choice(actives)
        room = [
            int(state.owner_reserved_pages[a, n]) * 64 + -int(state.owner_frontier[a, n]) % 64
            for n in range(state.capacity.num_pools)
        ]
        grow = rng.randint(0, max(0, min([*room, 130])))
        frontier = [int(t) + min(grow, max(r, 0)) for t, r in zip(state.owner_frontier[a], room, strict=True)]
        return advance(state, a, frontier), False
    if roll < 0.52 and actives:
        a = rng.choice(actives)
        floor = state.checkpoint_kv_tokens[checkpoints_of(state, a)].max(0, initial=0)
        borrowed = int((state.run_writer[[r for r, _ in space(state, a, 0)]] != a).sum())
        if borrowed == 0:
            goal = [rng.randint(int(f), int(t)) for f, t in zip(floor, state.owner_frontier[a], strict=True)]
            return truncate(state, a, goal), False
    if roll < 0.68 and actives:
        a = rng.choice(actives)
        f = [int(t) for t in state.owner_frontier[a]]
        if min(f) > 0:
            shared = rng.random() < 0.5
            used_ordinals = {int(state.checkpoint_ordinal[c]) for c in checkpoints_of(state, a)}
            ordinal = next(i for i in range(1, 50) if i not in used_ordinals)
            kind = CheckpointKind.SHARED_STABLE_PREFIX if shared else CheckpointKind.LONG_ANCHOR
            tier = rng.choice([Tier.DEVICE, Tier.HOST])
            spec = CheckpointSpec(max(f), kind, ordinal=ordinal)
            return capture(state, a, spec, shared=shared, state_tier=tier)[0], True
    if roll < 0.78 and actives:
        a = rng.choice(actives)
        if int(state.owner_frontier[a].min()) > 0:
            return finish(state, a), True
        return evict(state, a), True
    if roll < 0.84 and idle:
        o = rng.choice(idle)
        return drop_checkpoint(state, int(rng.choice(checkpoints_of(state, o).tolist()))), True
    if roll < 0.88 and idle:
        return evict(state, rng.choice(idle)), True
    if len(actives) < 4:
        problem = make_problem(state, naive.random_candidates(state, rng))
        targets = naive.random_targets(problem, rng, 1)
        if assess_numpy(problem, targets).fits[0]:
            if isinstance(place_recipe(problem, resolve(problem, targets))[1], Placed):
                return apply(problem, targets)[0], True
    return state, False


@pytest.mark.parametrize("seed", range(16))
def test_random_lives_keep_every_invariant(naive, seed):
    """Admissions under pressure, decode, captures, finishes and releases in any order (section 17)."""
    rng = random.Random(seed)
    state = naive.random_state(seed + 500, owners=3)
    for _ in range(25):
        revision = state.revision
        try:
            after, changes = step(naive, state, rng)
        except ValueError as refusal:
            assert "does not fit" in str(refusal), refusal
            continue
        check_invariants(after)
        assert used(after).tolist() == sets_used(naive, after)
        if changes:
            assert after.revision == revision + 1 or after is state
        else:
            assert after.revision == revision
            assert used(after).tolist() == used(state).tolist()
        state = after


@pytest.mark.parametrize("seed", range(16))
def test_exclusive_is_what_settles_if_the_owner_goes(naive, seed):
    state = naive.random_state(seed, apply=apply, make_problem=make_problem)
    for o in np.flatnonzero(eligible(state)):
        alone = used(state) - used(evict(state, int(o)))
        mine = exclusive(state, int(o))
        # a page left to active sequences gives up its Host replica as well, which R-6 does not count
        assert (alone >= mine).all()
        held = state.space_run[state.space_owner == o]
        with_active = np.isin(
            held, state.space_run[state.owner_kind[state.space_owner] == OwnerKind.ACTIVE]
        ).any()
        if not with_active and not (state.image_pins > 0).any():
            assert alone.tolist() == mine.tolist()


def test_generation_advances_when_a_row_is_reused():  # REV-06
    state = make_state(make_capacity(device_state_slots=2, device_pages=4), num_owners=1)
    state, x = add_owner(state, [CheckpointSpec(64)])
    old = checkpoint_ref(state, int(checkpoints_of(state, x)[0]))
    state, y = add_owner(evict(state, x), [CheckpointSpec(64)])
    assert y == x
    new = checkpoint_ref(state, int(checkpoints_of(state, y)[0]))
    assert old != new
    assert new.generation == old.generation + 1


def test_borrowed_read_counts_once_and_is_pinned_until_the_first_commit():  # S-3, S-4
    state = make_state(make_capacity(device_state_slots=3, device_pages=10, lanes=2))
    state, s = add_owner(state, [CheckpointSpec(64)], kind=OwnerKind.SHARED)
    from ninfer_jax.planner.candidate import Candidate, Disposition, root_candidate

    request = make_request(100, 0)
    source = Candidate(1, int(checkpoints_of(state, s)[0]), Disposition.RETAIN, request)
    problem = make_problem(state, [root_candidate(request), source])
    after, y = apply(problem, take(identity_targets(problem), np.array([1])))
    image = int(state.checkpoint_image[0])
    assert after.owner_reads[y] == image != after.owner_writes[y]
    assert after.image_pins[image] == 1
    assert used(after)[0] == 2
    assert exclusive(after, y)[0] == 1  # the binding owns the write destination only
    settled = settle_fork(after, y)
    assert settled.image_pins[image] == 0
    assert settled.owner_reads[y] == settled.owner_writes[y]
    assert settled.revision == after.revision


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_capacity(device_state_slots=-1, device_pages=4), "must be >= 0"),
        (lambda: make_capacity(device_state_slots=1, device_pages=(1, 1, 1)), "got 3 KV pools"),
        (lambda: make_capacity(device_state_slots=1, device_pages=2**30), "larger granule"),
        (lambda: make_capacity(device_state_slots=1, device_pages=1, page_granules=(1, 2)), "1 entries"),
        (lambda: make_request(0, 1), "prompt >= 1"),
    ],
)
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_commands_are_refused():
    state = make_state(make_capacity(device_state_slots=2, device_pages=4))
    state, x = add_owner(state, [CheckpointSpec(64)])
    state, a = activate_root(state, 100)
    for command, message in (
        (lambda: add_owner(state, []), "at least one"),
        (lambda: add_owner(state, [CheckpointSpec(64)]), "no free Device state slot"),
        (lambda: add_owner(state, [CheckpointSpec(64)], kind=OwnerKind.ACTIVE), "activate_root"),
        (lambda: advance(state, a, 129), "no step may exceed the entitlement"),
        (lambda: advance(state, x, 10), "expected ACTIVE"),
        (lambda: truncate(state, a, 5), "truncate to 5"),
        (lambda: evict(state, 5), "stale handle"),
    ):
        with pytest.raises(ValueError, match=message):
            command()


def test_axes_have_names_and_independent_residuals():
    capacity = make_capacity(device_state_slots=2, device_pages=(4, 3))
    names = axis_names(capacity)
    assert names[-1] == "device_backend_pages"
    assert len(names) == capacity.num_axes == 5
    over = residual(np.array([3, 0, 0, 1, 9]), capacity.units())
    assert over.tolist() == [1, 0, 0, 0, 6]
