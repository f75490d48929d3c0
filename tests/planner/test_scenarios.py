"""The physical scenario groups under their ids: OCC, REC, MV, COW, STG, physical parts of RDY, BF, PLAN."""

import numpy as np
import pytest

from ninfer_jax.planner.backfill import BackfillProof, BackfillRefused, is_proof_stale, prove_backfill
from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind, Tier
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.operations import (
    CheckpointSpec,
    activate_root,
    add_owner,
    advance,
    capture,
    evict,
    finish,
    place_image,
    set_edge,
    set_transaction,
    truncate,
)
from ninfer_jax.planner.options import ReplicaAction, Survivors
from ninfer_jax.planner.plan import Action, Readiness, StageName, is_stale
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import identity_targets, make_problem, maximal_targets
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.readiness import gate, isolated_root_fits, readiness
from ninfer_jax.planner.state import eligible, is_device_ready, is_valid, make_state, space, used
from ninfer_jax.planner.target import EVICT, KEEP, make_targets, take
from ninfer_jax.planner.transition import seal

STATE, HOST_STATE, HOST_KV, PAGES = range(4)


def empty(c=1, h=1, *, pages=100, host_states=0, host_pages=0, **extra):
    """C=c, H=h: c + h Device slots; a page is 10 bytes, a StateImage 100 (the scenarios' conventions)."""
    return make_state(
        make_capacity(
            device_state_slots=c + h,
            device_pages=pages,
            host_state_slots=host_states,
            host_kv_granules=host_pages,
            granule_bytes=10,
            state_image_bytes=100,
            lanes=c,
            **extra,
        )
    )


def checkpoint_row(state, owner, kind=None):
    rows = [
        c
        for c in range(len(state.checkpoint_owner))
        if state.checkpoint_owner[c] == owner and (kind is None or state.checkpoint_kind[c] == kind)
    ]
    assert len(rows) == 1
    return rows[0]


def from_source(state, owner, how, request, kind=None):
    """Root and one candidate; returns the problem and the candidate's identity target."""
    source = Candidate(1, checkpoint_row(state, owner, kind), how, request)
    problem = make_problem(state, [root_candidate(request), source])
    return problem, take(identity_targets(problem), np.array([1]))


def only_root(state, request):
    problem = make_problem(state, [root_candidate(request)])
    return problem, identity_targets(problem)


def code_of(problem, **wanted):
    """Option code of the template with exactly these fields."""
    defaults = dict(survivors=Survivors.ALL, argument=0, state=0, state_extent=0, kv=0, kv_extent=0)
    want = {**defaults, **wanted}
    for k, t in enumerate(problem.options.templates):
        if k > 1 and all(getattr(t, name) == value for name, value in want.items()):
            return k
    raise AssertionError(f"no option {wanted}")


def target_with(problem, candidate, choices):
    """Identity of the candidate with some owners' codes replaced."""
    codes = identity_targets(problem).codes[candidate].copy()
    row = {int(o): v for v, o in enumerate(problem.victims)}
    for owner, code in choices.items():
        codes[row[owner]] = code
    return make_targets(candidate, codes)


def reclaim(state, owners):
    """R-8 for evicting `owners`: Used(S) - Used(PostState), the request's own needs left out."""
    problem, identity = only_root(state, make_request(1, 0))
    target = target_with(problem, 0, {o: EVICT for o in owners})
    both = [assess_numpy(problem, t).used[0, -1] for t in (identity, target)]
    return (both[0] - both[1]).tolist()


# ---------------------------------------------------------------- occupancy


def occ_01():
    state = empty(2, 2, pages=12)
    state, x = add_owner(state, [CheckpointSpec(130)])
    problem, identity = from_source(state, x, Disposition.RETAIN, make_request(200, 100))
    return (*apply(problem, identity), x)


def test_occ_01_pages_of_several_address_spaces_count_once():
    state, y, _ = occ_01()
    check_invariants(state)
    allocated = state.run_pages[state.run_device & (state.run_pool == 0)].sum()
    assert allocated == 4
    assert state.owner_reserved_pages[y].tolist() == [2]
    assert used(state)[PAGES] == 6
    assert len(state.space_run) > allocated - 1  # more references than pages are counted nowhere


def test_occ_02_materialising_moves_a_unit():
    state, y, _ = occ_01()
    later = advance(state, y, 200)
    check_invariants(later)
    assert later.owner_reserved_pages[y].tolist() == [1]
    assert used(later)[PAGES] == used(state)[PAGES] == 6
    assert later.revision == state.revision


def test_occ_04_axes_never_compensate():
    state = empty(1, 5, pages=2, host_pages=1000)
    problem, identity = only_root(state, make_request(192, 0))
    got = assess_numpy(problem, identity)
    assert not got.fits[0]
    assert got.residual[0].tolist() == [0, 0, 0, 1]


def test_occ_05_both_tiers_are_two_allocations():
    state = empty(1, 1, host_states=2)
    state, x = add_owner(state, [CheckpointSpec(64)], state_tier=Tier.BOTH)
    assert used(state)[[STATE, HOST_STATE]].tolist() == [1, 1]
    c, image = checkpoint_row(state, x), int(state.checkpoint_image[checkpoint_row(state, x)])
    device_only = place_image(state, image, Tier.DEVICE)
    assert used(device_only)[[STATE, HOST_STATE]].tolist() == [1, 0]
    assert is_device_ready(device_only, c)
    host_only = place_image(state, image, Tier.HOST)
    assert used(host_only)[[STATE, HOST_STATE]].tolist() == [0, 1]
    assert is_valid(host_only, c)
    assert not is_device_ready(host_only, c)


# ---------------------------------------------------------------- joint reclaim


def test_rec_01_joint_reclaim_exceeds_the_sum():
    state = empty(1, 4)
    state, s = add_owner(state, [CheckpointSpec(320)], kind=OwnerKind.SHARED)
    state, x = add_owner(state, [CheckpointSpec(320 + 128)], share_with=s, share_tokens=320)
    assert reclaim(state, [x]) == [1, 0, 0, 2]
    assert reclaim(state, [s]) == [1, 0, 0, 0]
    assert reclaim(state, [x, s]) == [2, 0, 0, 7]  # T-6


def test_rec_03_three_aliases_release_one_image_once():
    state = empty(1, 4)
    state, x = add_owner(state, [CheckpointSpec(64)])
    image = int(state.checkpoint_image[checkpoint_row(state, x)])
    state, y = add_owner(state, [CheckpointSpec(64, image=image)], share_with=x, share_tokens=64)
    state, s = add_owner(
        state, [CheckpointSpec(64, image=image)], kind=OwnerKind.SHARED, share_with=x, share_tokens=64
    )
    assert reclaim(state, [x, y])[STATE] == 0
    assert reclaim(state, [x, y, s])[STATE] == 1


def test_rec_04_pages_of_an_active_request_are_not_reclaimable():
    state = empty(2, 6)
    state, s = add_owner(state, [CheckpointSpec(192)], kind=OwnerKind.SHARED)
    problem, identity = from_source(state, s, Disposition.RETAIN, make_request(300, 0))
    state, z = apply(problem, identity)
    state, x = add_owner(state, [CheckpointSpec(256)], share_with=s, share_tokens=192)
    assert state.edges[z, s]
    assert eligible(state)[s] == False  # noqa: E712
    assert eligible(state)[x]
    assert reclaim(state, [x]) == [1, 0, 0, 1]


# ---------------------------------------------------------------- Move, Fork, Retain


def test_mv_01_consumed_sole_reference_is_a_move():
    state = empty(1, 1)
    state, x = add_owner(state, [CheckpointSpec(128)])
    image = int(state.checkpoint_image[checkpoint_row(state, x)])
    problem, identity = from_source(state, x, Disposition.CONSUME, make_request(200, 0))
    got = assess_numpy(problem, identity)
    assert not got.is_fork[0]
    assert got.d2d[0].tolist() == [0, 0]
    assert got.peak[0, STATE] == 1
    after, y = apply(problem, identity)
    assert after.owner_writes[y] == image
    assert used(after)[STATE] == 1
    assert after.owner_lineage[y] == x


def test_mv_02_a_surviving_alias_makes_it_a_fork():
    for h, feasible in ((1, True), (0, False)):
        state = empty(1, h)
        state, x = add_owner(state, [CheckpointSpec(128)])
        image = int(state.checkpoint_image[checkpoint_row(state, x)])
        state, s = add_owner(
            state, [CheckpointSpec(128, image=image)], kind=OwnerKind.SHARED, share_with=x, share_tokens=128
        )
        problem, identity = from_source(state, x, Disposition.CONSUME, make_request(200, 0))
        got = assess_numpy(problem, identity)
        assert got.is_fork[0]
        assert got.used[0, -1, STATE] == 2
        assert bool(got.fits[0]) is feasible
        # with the alias evicted in the same target, the very same consume is a Move
        without = assess_numpy(problem, target_with(problem, 1, {s: EVICT}))
        assert not without.is_fork[0]
        assert without.fits[0]


def test_mv_04_consuming_at_an_anchor_still_forks():
    state = empty(1, 3)
    anchor = CheckpointSpec(300, CheckpointKind.LONG_ANCHOR, ordinal=1)
    state, x = add_owner(state, [CheckpointSpec(900), anchor])
    problem, identity = from_source(
        state, x, Disposition.CONSUME, make_request(600, 0), CheckpointKind.LONG_ANCHOR
    )
    assert assess_numpy(problem, identity).is_fork[0]
    after, y = apply(problem, identity)
    check_invariants(after)
    left = checkpoint_row(after, y)
    assert (
        after.checkpoint_frontier[left] == 300
    )  # the anchor belongs to the new lineage, the endpoint is gone
    assert used(after)[STATE] == 2
    assert used(after)[PAGES] == 10  # ceil(600 / 64): nothing of 900 tokens is left behind


def test_mv_05_shared_source_is_forked_and_protected():
    state = empty(2, 3)
    state, s = add_owner(state, [CheckpointSpec(128)], kind=OwnerKind.SHARED)
    actives = []
    for _ in range(2):
        problem, identity = from_source(state, s, Disposition.RETAIN, make_request(200, 0))
        assert assess_numpy(problem, identity).is_fork[0]
        state, y = apply(problem, identity)
        actives.append(y)
        check_invariants(state)
    assert [bool(state.edges[y, s]) for y in actives] == [True, True]
    for y in actives:
        assert not eligible(state)[s]
        state = finish(advance(state, y, 200), y)
    assert eligible(state)[s]
    assert state.checkpoint_frontier[checkpoint_row(state, s)] == 128


def test_mv_05_a_shared_owner_cannot_be_consumed():
    state = empty(1, 3)
    state, s = add_owner(state, [CheckpointSpec(128)], kind=OwnerKind.SHARED)
    with pytest.raises(ValueError, match="shared or protected"):
        from_source(state, s, Disposition.CONSUME, make_request(200, 0))


# ---------------------------------------------------------------- partial-tail COW and capture shape


@pytest.mark.parametrize(("frontier", "copied"), [(130, 1), (128, 0)])
def test_cow_01_02_a_fork_copies_exactly_the_partial_tail(frontier, copied):
    state = empty(1, 3)
    state, x = add_owner(state, [CheckpointSpec(frontier)])
    problem, identity = from_source(state, x, Disposition.RETAIN, make_request(300, 0))
    got = assess_numpy(problem, identity)
    assert got.d2d[0].tolist() == [1, copied]
    assert got.used[0, 5, PAGES] - got.used[0, 4, PAGES] == copied  # reserved in RESTORE, before the commit
    after, y = apply(problem, identity)
    check_invariants(after)
    assert len([r for r, _ in space(after, y, 0)]) == 1 + copied
    assert after.owner_reserved_pages[y].tolist() == [3 - copied]


def test_cow_03_page_arithmetic():
    state = empty(1, 1)
    state, x = add_owner(state, [CheckpointSpec(1000)])
    rows = space(state, x, 0)
    assert [int(state.run_pages[r]) for r, _ in rows] == [15, 1]
    assert [int(state.run_committed[r]) for r, _ in rows] == [64, 40]


def test_cow_04_shared_capture_at_an_unaligned_frontier():
    state, y, _ = occ_01()  # page 0 and 1 shared with X, page 2 the copied tail
    before = used(state)
    runs_before = {r for r, _ in space(state, y, 0)}
    state, s = capture(state, y, CheckpointSpec(130, CheckpointKind.SHARED_STABLE_PREFIX), shared=True)
    check_invariants(state)
    assert used(state)[PAGES] == before[PAGES] + 1  # exactly one page copied
    assert {r for r, _ in space(state, s, 0)} == runs_before
    tail = space(state, y, 0)[-1][0]
    assert tail not in runs_before
    assert state.run_writer[tail] == y
    assert state.run_writer[space(state, s, 0)[-1][0]] == -1


def test_cow_05_shared_capture_at_an_aligned_frontier():
    state = empty(1, 3)
    state, y = activate_root(state, 500)
    state = advance(state, y, 192)
    before = used(state)
    state, s = capture(state, y, CheckpointSpec(192, CheckpointKind.SHARED_STABLE_PREFIX), shared=True)
    check_invariants(state)
    assert (used(state) - before).tolist() == [1, 0, 0, 0]
    state = advance(state, y, 193)
    check_invariants(state)
    assert len(space(state, y, 0)) == len(space(state, s, 0)) + 1


@pytest.mark.parametrize(
    ("frontier", "shared", "copied_pages"), [(5000, False, 0), (5000, True, 1), (4992, True, 0)]
)
def test_anc_02_capture_as_a_host_snapshot(frontier, shared, copied_pages):
    """K-5, E-6: a full Device takes the image to a Host slot; the pages are captured as on Device."""
    state = empty(1, 0, pages=120, host_states=1)
    state, y = activate_root(state, 5200)
    state = advance(state, y, frontier)
    spec = CheckpointSpec(
        frontier, CheckpointKind.SHARED_STABLE_PREFIX if shared else CheckpointKind.LONG_ANCHOR
    )
    with pytest.raises(ValueError, match="no free Device state slot of 1; release something first"):
        capture(state, y, spec, shared=shared)
    before, runs = used(state), {r for r, _ in space(state, y, 0)}
    after, holder = capture(state, y, spec, shared=shared, state_tier=Tier.HOST)
    check_invariants(after)
    assert (used(after) - before).tolist() == [0, 1, 0, copied_pages]
    assert {r for r, _ in space(after, holder, 0)} >= runs  # the checkpoint keeps the very pages
    row = checkpoint_row(after, holder)
    assert is_valid(after, row) and not is_device_ready(after, row)
    assert after.owner_writes[y] == state.owner_writes[y]  # the sequence goes on in its own image
    with pytest.raises(ValueError, match="no free Host state slot of 1"):
        capture(
            after,
            y,
            CheckpointSpec(frontier, CheckpointKind.TURN_CLOSURE),
            shared=False,
            state_tier=Tier.HOST,
        )


def test_cow_07_each_typed_pool_has_its_own_frontier():
    for backend, fits in ((8, True), (7, False)):
        state = empty(1, 3, pages=(20, backend))
        state, y = activate_root(state, (400, 400))
        state = advance(state, y, (192, 191))
        before = used(state)
        spec = CheckpointSpec(192, CheckpointKind.SHARED_STABLE_PREFIX, kv_tokens=(192, 191))
        if not fits:
            with pytest.raises(ValueError, match="device_backend_pages 8 > 7"):
                capture(state, y, spec, shared=True)
            continue
        state, _ = capture(state, y, spec, shared=True)
        check_invariants(state)
        assert (used(state) - before).tolist() == [1, 0, 0, 0, 1]


# ---------------------------------------------------------------- stage peaks


def test_stg_01_state_swap_without_slack():
    state = empty(1, 0, host_states=1)
    state, x = add_owner(state, [CheckpointSpec(64)])
    state, y = add_owner(state, [CheckpointSpec(64)], state_tier=Tier.HOST)
    problem, _ = from_source(state, y, Disposition.CONSUME, make_request(100, 0))
    demote = target_with(problem, 1, {x: code_of(problem, state=ReplicaAction.DEMOTE)})
    got = assess_numpy(problem, demote)
    assert got.used[0, -1, :2].tolist() == [1, 1]  # the end state would fit
    assert not got.fits[0]
    assert got.residual[0, HOST_STATE] == 1
    assert seal(problem, demote) is None
    assert assess_numpy(problem, target_with(problem, 1, {x: EVICT})).fits[0]


def test_stg_02_host_release_comes_before_the_demotion_copy():
    state = empty(1, 0, host_states=1)
    state, x = add_owner(state, [CheckpointSpec(64)])
    state, z = add_owner(state, [CheckpointSpec(64)], state_tier=Tier.HOST)
    problem, identity = only_root(state, make_request(100, 0))
    assert not assess_numpy(problem, identity).fits[0]
    target = target_with(problem, 0, {z: EVICT, x: code_of(problem, state=ReplicaAction.DEMOTE)})
    got = assess_numpy(problem, target)
    assert got.fits[0]
    assert got.used[0, :, HOST_STATE].tolist() == [1, 0, 1, 1, 1, 1, 1]
    assert got.used[0, :, STATE].tolist() == [1, 1, 1, 1, 0, 1, 1]
    plan = seal(problem, target)
    order = [s.action for s in plan.steps]
    assert order.index(Action.RELEASE_HOST) < order.index(Action.RESERVE_HOST) < order.index(Action.COPY_D2H)
    assert [s.stage for s in plan.steps] == sorted(s.stage for s in plan.steps)


@pytest.mark.parametrize("free_bytes", [60, 50])
def test_stg_03_demotion_bounded_by_host_bytes(free_bytes):
    state = empty(2, 2, pages=10, host_pages=free_bytes // 10)
    state, x = add_owner(state, [CheckpointSpec(64 * 6)])
    state, _ = activate_root(state, 64 * 3)
    problem, identity = only_root(state, make_request(64 * 7, 0))
    assert assess_numpy(problem, identity).residual[0, PAGES] == 6
    full = target_with(problem, 0, {x: code_of(problem, kv=ReplicaAction.DEMOTE)})
    got = assess_numpy(problem, full)
    assert bool(got.fits[0]) is (free_bytes == 60)
    if free_bytes == 50:
        assert got.residual[0].tolist() == [0, 0, 1, 0]
        fitting = [k for k in np.flatnonzero(problem.options.valid[0]) if _fits(problem, x, int(k))]
        assert fitting == [EVICT]  # X has one checkpoint: nothing smaller helps


def _fits(problem, owner, code):
    return bool(assess_numpy(problem, target_with(problem, 0, {owner: code})).fits[0])


# ---------------------------------------------------------------- active guarantee (physical part)


def test_act_01_what_publication_reserves():
    problem, identity = only_root(empty(), make_request(100, 50))
    state, y = apply(problem, identity)
    assert used(state).tolist() == [1, 0, 0, 3]
    state = advance(state, y, 100)
    assert state.owner_reserved_pages[y].tolist() == [1]


def test_act_02_truncation_keeps_the_capacity():
    state, y = activate_root(empty(), 320)
    state = advance(state, y, 320)
    rolled = truncate(state, y, 180)
    check_invariants(rolled)
    assert rolled.owner_reserved_pages[y].tolist() == [2]
    assert used(rolled)[PAGES] == 5
    assert rolled.revision == state.revision


def test_act_05_lease_growth_reserves_a_bounded_window():
    assert make_request(100, 10000, lease_tokens=4096).capacity_tokens == (4196,)
    state = empty(pages=200)
    for lease, pages in ((4096, 66), (None, 158)):
        problem, identity = only_root(state, make_request(100, 10000, lease_tokens=lease))
        assert assess_numpy(problem, identity).used[0, -1, PAGES] == pages


def test_rev_02_listed_causes_bump_once():
    state = empty(2, 3, host_states=3, host_pages=20)
    state, x = add_owner(state, [CheckpointSpec(100)])
    before = state.revision
    state, y = activate_root(state, 100)
    state = place_image(state, int(state.checkpoint_image[checkpoint_row(state, x)]), Tier.HOST)
    state = evict(state, y)
    state = evict(state, x)
    assert state.revision == before + 4


# ---------------------------------------------------------------- readiness, stale plans, backfill


def test_rdy_01_permanently_infeasible():
    state = empty(pages=10)
    assert not isolated_root_fits(state.capacity, make_request(700, 0))
    assert gate(state, make_request(700, 0)) == Readiness.PERMANENTLY_INFEASIBLE
    assert gate(state, make_request(640, 0)) is None


def test_rdy_02_temporarily_blocked_then_ready():
    state = empty(2, 0, pages=10)
    state, a = activate_root(state, 64 * 6)
    request = make_request(64 * 6, 0)
    problem, _ = only_root(state, request)
    root_maximal = assess_numpy(problem, maximal_targets(problem))
    assert readiness(state, request, root_maximal) == Readiness.TEMPORARILY_BLOCKED
    state = evict(state, a)
    problem, identity = only_root(state, request)
    assert readiness(state, request, assess_numpy(problem, identity)) == Readiness.READY


def test_rdy_04_ready_by_move():
    state = empty()
    state, x = add_owner(state, [CheckpointSpec(128)])
    request = make_request(200, 0)
    problem, identity = from_source(state, x, Disposition.CONSUME, request)
    assert readiness(state, request, assess_numpy(problem, identity)) == Readiness.READY
    assert seal(problem, identity).readiness == Readiness.READY


def test_rdy_06_open_transaction_blocks():
    state = set_transaction(empty(2), is_open=True)
    assert gate(state, make_request(10, 0)) == Readiness.TEMPORARILY_BLOCKED
    assert gate(set_transaction(state, is_open=False), make_request(10, 0)) is None


def test_id_07_host_only_needs_transfer():
    state = empty(host_states=1, host_pages=10)
    state, x = add_owner(state, [CheckpointSpec(128)], kv_tier=Tier.HOST, state_tier=Tier.HOST)
    assert is_valid(state, checkpoint_row(state, x))
    request = make_request(200, 0)
    problem, identity = from_source(state, x, Disposition.CONSUME, request)
    got = assess_numpy(problem, identity)
    assert readiness(state, request, got) == Readiness.NEEDS_TRANSFER
    assert got.h2d[0].tolist() == [1, 2]
    after, _ = apply(problem, identity)
    assert used(after).tolist() == [1, 0, 0, 4]  # the consumed source's Host replicas are gone


def test_id_06_missing_backend_coverage_is_no_checkpoint():
    state = empty(1, 1, pages=(10, 10))
    state, x = add_owner(state, [CheckpointSpec(256, kv_tokens=(256, 256))])
    run = space(state, x, 1)[0][0]
    state.run_device_columns[run] = 63
    assert not is_valid(state, checkpoint_row(state, x))
    with pytest.raises(ValueError, match="C-5"):
        check_invariants(state)


def test_plan_04_root_maximal_is_the_safety_net():  # G-4, physical part
    state = empty(1, 1, pages=6)
    state, x = add_owner(state, [CheckpointSpec(64 * 4)])
    request = make_request(64 * 5, 0)
    problem, identity = only_root(state, request)
    assert not assess_numpy(problem, identity).fits[0]
    maximal = assess_numpy(problem, maximal_targets(problem))
    assert maximal.fits[0]
    assert maximal.evictions[0] == 1
    assert readiness(state, request, maximal) == Readiness.NEEDS_TRANSFER
    plan = seal(problem, maximal_targets(problem))
    assert plan.victims[0].owner == x
    assert [ref.kind for ref in plan.victims[0].dropped] == [CheckpointKind.SESSION_ENDPOINT]


def test_tx_01_a_plan_is_bound_to_its_revision():
    state = empty()
    problem, identity = only_root(state, make_request(10, 0))
    plan = seal(problem, identity)
    assert not is_stale(plan, state.revision)
    assert is_stale(plan, state.revision + 1)
    assert plan.plan_id == seal(problem, identity).plan_id
    assert plan.plan_id != seal(problem, identity, intent=(7,)).plan_id


def test_tx_03_phases_without_copies():
    state = empty(1, 0)
    state, _ = add_owner(state, [CheckpointSpec(64)])
    problem, _ = only_root(state, make_request(10, 0))
    plan = seal(problem, maximal_targets(problem))
    assert StageName.COPIES_IN_FLIGHT not in {s.stage for s in plan.steps}


def backfill_case(borrower_pages, lanes=3):
    state = empty(lanes, 3, pages=20)
    state, donor = activate_root(state, 64 * 8)
    state, _ = add_owner(state, [CheckpointSpec(64 * 4)])
    problem, identity = only_root(state, make_request(64 * borrower_pages, 0))
    head = make_request(64 * 14, 0)
    return state, prove_backfill(problem, identity, head=head, donors=[donor])


def test_bf_01_qualification_arithmetic():
    assert isinstance(backfill_case(5)[1], BackfillProof)
    assert isinstance(backfill_case(6)[1], BackfillProof)
    refused = backfill_case(7)[1]
    assert isinstance(refused, BackfillRefused)
    assert refused.residual.tolist() == [0, 0, 0, 1]
    assert "lane" in backfill_case(5, lanes=1)[1].reason


def test_bf_01_a_borrower_that_protects_its_source_counts_it():
    state = empty(3, 3, pages=20)
    state, donor = activate_root(state, 64 * 8)
    state, x = add_owner(state, [CheckpointSpec(64 * 4)])
    request = make_request(64 * 6, 0)
    problem, identity = from_source(state, x, Disposition.RETAIN, request)
    # 2 pages of its own and 4 shared: the 4 stay protected, so the head finds 20 - 6
    assert isinstance(
        prove_backfill(problem, identity, head=make_request(64 * 14, 0), donors=[donor]), BackfillProof
    )
    refused = prove_backfill(problem, identity, head=make_request(64 * 15, 0), donors=[donor])
    assert isinstance(refused, BackfillRefused)


def test_bf_03_proof_is_bound_to_a_revision():
    state, proof = backfill_case(5)
    assert not is_proof_stale(proof, state.revision)
    assert is_proof_stale(proof, state.revision + 1)


def test_edges_keep_an_owner_out_of_the_domain():  # T-2, P-3
    state = empty(2, 3)
    state, x = add_owner(state, [CheckpointSpec(64)])
    state, a = activate_root(state, 64)
    state = set_edge(state, a, x)
    problem, _ = only_root(state, make_request(10, 0))
    assert problem.num_victims == 0
    assert KEEP not in maximal_targets(problem).codes
