"""seal and apply: one chosen target becomes an ordered plan, and the state after it (X-1, R-10).

Owns: the canonical steps of a target, the work counts of one target, the post-state. Sealing decides
nothing and executes nothing; the program executes, and `apply` says what must be true afterwards.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from ninfer_jax.planner.candidate import remaining_prefill
from ninfer_jax.planner.extents import Blocked, release, take_intervals
from ninfer_jax.planner.ids import (
    NO_EXTENT,
    NO_IMAGE,
    NO_OWNER,
    NO_SLOT,
    CheckpointRef,
    Generation,
    ImageId,
    OwnerId,
    OwnerKind,
    Revision,
    RunId,
    Tier,
)
from ninfer_jax.planner.plan import Action, Committed, Readiness, ResourcePlan, StageName, Step, VictimClaim
from ninfer_jax.planner.problem import GROWTH as GROWTH_GROUP
from ninfer_jax.planner.problem import NUM_NEEDS, ImageRule, Problem, base_tokens
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.resolution import Piece, Recipe, Resolution, When, place_recipe, resolve
from ninfer_jax.planner.rows import (
    copied,
    cut_space,
    free_checkpoint,
    free_owner,
    free_slot,
    new_image,
    new_owner,
    new_run,
    put_run,
    settled,
    split_run,
    trim_space,
    with_entries,
)
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.state import PhysicalState, checkpoint_ref, checkpoints_of, space
from ninfer_jax.planner.target import TargetBatch, make_targets
from ninfer_jax.planner.work import Direction, Phase, TransferWork, Work, coalesce


def immediate_work(problem: Problem, candidate: int, assessment: Assessment, row: int) -> Work:
    """Returns the transfers and the remaining prefill of one assessed target, as counts (O-2)."""
    sizes = problem.state.capacity.item_bytes()

    def moved(phase: Phase, direction: Direction, units: np.ndarray, ops: np.ndarray) -> TransferWork:
        num_bytes = sum(int(u) * b for u, b in zip(units, sizes, strict=True))
        return TransferWork(phase, direction, int(ops.sum()), num_bytes)

    transfers = (
        moved(Phase.PRESSURE, Direction.D2H, assessment.d2h[row], assessment.d2h_ops[row]),
        moved(Phase.CANDIDATE, Direction.H2D, assessment.h2d[row], assessment.h2d_ops[row]),
        moved(Phase.CANDIDATE, Direction.D2D, assessment.d2d[row], assessment.d2d[row]),
    )
    request = problem.candidates[candidate].request
    return Work(coalesce(transfers), remaining_prefill(request, base_tokens(problem, candidate)))


def seal(
    problem: Problem, target: TargetBatch, *, intent: tuple[int, ...] = ()
) -> ResourcePlan | Blocked | None:
    """Returns the sealed plan of one target; Blocked if the arena refuses it, None if an axis does.

    Args:
        target: a batch of one.
        intent: the caller's final schedule intent, consumed here; a plan has no mutation API (G-3).
    """
    assessment = assess_numpy(problem, target)
    if not bool(assessment.fits[0]):
        return None
    resolution = resolve(problem, target)
    recipe, placed = place_recipe(problem, resolution)
    if isinstance(placed, Blocked):
        return placed
    state, which = problem.state, resolution.candidate
    checkpoint = problem.candidates[which].checkpoint
    dropped: dict[int, list[CheckpointRef]] = {owner: [] for owner in resolution.degraded}
    for c in resolution.dropped:
        dropped[int(state.checkpoint_owner[c])].append(checkpoint_ref(state, c))
    victims = []
    for owner, refs in dropped.items():
        generation = Generation(int(state.owner_generation[owner]))
        victims.append(VictimClaim(OwnerId(owner), generation, owner in resolution.evicted, tuple(refs)))
    readiness = Readiness.NEEDS_TRANSFER
    if not assessment.degraded[0] and not assessment.h2d[0].any():
        readiness = Readiness.READY
    return ResourcePlan(
        _plan_id(problem, resolution, intent),
        Revision(state.revision),
        problem.candidates[which],
        None if checkpoint is None else checkpoint_ref(state, checkpoint),
        tuple(victims),
        _steps(problem, resolution, recipe, placed.starts),
        assessment.used[0],
        immediate_work(problem, which, assessment, 0),
        base_tokens(problem, which),
        readiness,
        intent,
    )


def apply(problem: Problem, target: TargetBatch) -> tuple[PhysicalState, OwnerId]:
    """Returns the stable state after the target was committed, and the row of the new active sequence.

    Raises:
        ValueError: if the target does not fit at some stage; assess or seal first.
    """
    assessment = assess_numpy(problem, target)
    if not bool(assessment.fits[0]):
        raise ValueError(f"target is {assessment.residual[0].tolist()} units over capacity at its peak")
    resolution = resolve(problem, target)
    recipe, placed = place_recipe(problem, resolution)
    if isinstance(placed, Blocked):
        raise ValueError(f"the Host arena has no hole for extent {placed.index}: {placed}")
    state, pieces = _cut_partial_runs(problem.state, resolution)
    images = len(problem.state.image_live)
    index = {id(p): i for i, p in enumerate(resolution.pieces)}
    starts = {index[id(p)]: s for p, s in zip(recipe.pieces, placed.starts, strict=True)}
    state = _free(state, pieces, images, When.NOW)
    state = _copy_to_host(state, pieces, images, starts)
    state = _free(state, pieces, images, When.COPIED)
    state = _degrade(state, resolution)
    state = _restore(state, pieces, images)
    state, owner = _activate(problem, state, resolution)
    state = _free(state, pieces, images, When.LATE)
    return settled(state), owner


def committed(
    problem: Problem, target: TargetBatch, plan: ResourcePlan, revision: int, owner: OwnerId
) -> Committed:
    """Returns the absolute result that a successful transition of `plan` reports (X-8)."""
    resolution = resolve(problem, target)
    gone = (*resolution.dropped, *resolution.released)
    deleted: tuple[CheckpointRef, ...] = tuple(sorted(checkpoint_ref(problem.state, c) for c in gone))
    evicted = tuple(OwnerId(o) for o in resolution.evicted)
    return Committed(plan.plan_id, Revision(revision), owner, deleted, evicted)


def one_target(targets: TargetBatch, row: int) -> TargetBatch:
    """Returns row `row` as a batch of one."""
    return make_targets(targets.candidate[row : row + 1], targets.codes[row : row + 1])


# ---------------------------------------------------------------- plan


def _plan_id(problem: Problem, resolution: Resolution, intent: tuple[int, ...]) -> str:
    text = repr((problem.state.revision, resolution.candidate, resolution.codes, intent))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _steps(
    problem: Problem, resolution: Resolution, recipe: Recipe, starts: tuple[int, ...]
) -> tuple[Step, ...]:
    state, images = problem.state, len(problem.state.image_live)
    source = problem.sources[resolution.candidate]
    steps: list[Step] = []

    def on(stage: StageName, action: Action, p: Piece, host_start: int = -1) -> Step:
        if p.item == 0:
            return Step(stage, action, image=ImageId(p.obj), host_start=host_start)
        run = RunId(p.obj - images)
        return Step(stage, action, run=run, pool=p.item - 1, pages=(p.first, p.last), host_start=host_start)

    s, a = StageName, Action
    for owner in resolution.evicted:
        steps.append(Step(s.HOST_RELEASES, a.EVICT_OWNER, owner=OwnerId(owner)))
    for c in resolution.dropped:
        if int(state.checkpoint_owner[c]) not in resolution.evicted:
            steps.append(Step(s.HOST_RELEASES, a.DROP_CHECKPOINT, checkpoint=checkpoint_ref(state, c)))
    for p in resolution.pieces:
        if p.frees_host == When.NOW:
            steps.append(on(s.HOST_RELEASES, a.RELEASE_HOST, p))
        if p.frees_device == When.NOW:
            steps.append(on(s.HOST_RELEASES, a.RELEASE_DEVICE, p))
    copies = [(p, -1) for p in resolution.pieces if p.item == 0 and p.copies_d2h]
    copies += list(zip(recipe.pieces, starts, strict=True))
    steps += [on(s.COPY_PREPARATION, a.RESERVE_HOST, p, start) for p, start in copies]
    steps += [on(s.COPIES_IN_FLIGHT, a.COPY_D2H, p, start) for p, start in copies]
    steps += [on(s.COPY_PUBLICATION, a.PUBLISH_HOST, p, start) for p, start in copies]
    steps += [
        on(s.COPY_PUBLICATION, a.RELEASE_DEVICE, p)
        for p in resolution.pieces
        if p.frees_device == When.COPIED
    ]
    steps += [on(s.RESTORE, a.RESTORE_H2D, p) for p in resolution.pieces if p.restores_h2d]
    for pool, obj, from_host in resolution.tail_copies:
        action = a.COPY_TAIL_H2D if from_host else a.COPY_TAIL_D2D
        steps.append(Step(s.RESTORE, action, run=RunId(obj - images), pool=pool, pages=(0, 1)))
    if source.image_rule == ImageRule.NEW:
        steps.append(Step(s.RESTORE, a.NEW_STATE))
    elif resolution.forks:
        from_device = state.image_device[source.image_obj] != NO_SLOT
        action = a.FORK_STATE_D2D if from_device else a.FORK_STATE_H2D
        steps.append(Step(s.RESTORE, action, image=ImageId(source.image_obj)))
    else:
        steps.append(Step(s.COMMITTED, a.MOVE_STATE, image=ImageId(source.image_obj)))
    for o, need in zip(source.obj, source.need, strict=True):
        if need and problem.objects.item[o] > 0:
            pages = (0, int(problem.objects.size[o]))
            pool = int(problem.objects.item[o]) - 1
            steps.append(Step(s.COMMITTED, a.TAKE_PAGES, run=RunId(int(o) - images), pool=pool, pages=pages))
    for pool, growth in enumerate(_growth(problem, resolution.candidate)):
        steps.append(Step(s.COMMITTED, a.RESERVE_GROWTH, pool=pool, pages=(0, int(growth))))
    if source.consume:
        steps.append(Step(s.COMMITTED, a.CONSUME_OWNER, owner=OwnerId(source.owner)))
        steps += [
            Step(s.COMMITTED, a.DROP_CHECKPOINT, checkpoint=checkpoint_ref(state, c))
            for c in resolution.released
        ]
    for p in resolution.pieces:
        if p.frees_host == When.LATE:
            steps.append(on(s.COMMITTED, a.RELEASE_HOST, p))
        if p.frees_device == When.LATE:
            steps.append(on(s.COMMITTED, a.RELEASE_DEVICE, p))
    return tuple(steps)


def _growth(problem: Problem, candidate: int) -> np.ndarray:
    row = problem.tables.needs[candidate].reshape(NUM_NEEDS, -1)
    return row[GROWTH_GROUP, 1:]


# ---------------------------------------------------------------- post-state


def _cut_partial_runs(state: PhysicalState, resolution: Resolution) -> tuple[PhysicalState, list[Piece]]:
    """Returns the state with every partial piece a run of its own, and the pieces by their new object ids."""
    images = len(state.image_live)
    pieces = []
    for p in resolution.pieces:
        if p.item > 0 and p.first > 0:
            state, new = split_run(state, RunId(p.obj - images), p.first)
            p = replace(p, obj=new + images, first=0, last=p.size)
        pieces.append(p)
    return copied(state), pieces


def _free(state: PhysicalState, pieces: list[Piece], images: int, when: When) -> PhysicalState:
    arena = state.arena
    granules = state.capacity.page_granules()
    for p in pieces:
        if p.item == 0:
            if p.frees_device == when:
                state.image_device[p.obj] = NO_SLOT
            if p.frees_host == when:
                state.image_host[p.obj] = NO_SLOT
            continue
        run = p.obj - images
        if p.frees_device == when:
            state.run_device[run], state.run_device_columns[run] = False, 0
        if p.frees_host == when and state.run_host_start[run] != NO_EXTENT:
            length = p.size * int(granules[p.item - 1])
            arena = release(arena, [(int(state.run_host_start[run]), length)])
            state.run_host_start[run], state.run_host_columns[run] = NO_EXTENT, 0
    return replace(state, arena=arena)


def _copy_to_host(
    state: PhysicalState, pieces: list[Piece], images: int, starts: dict[int, int]
) -> PhysicalState:
    taken: list[tuple[int, int]] = []
    granules = state.capacity.page_granules()
    for i, p in enumerate(pieces):
        if not p.copies_d2h:
            continue
        if p.item == 0:
            slots = state.image_host[state.image_live]
            state.image_host[p.obj] = free_slot(slots, state.capacity.host_state_slots, "Host state slot")
            state.image_host_epoch[p.obj] = state.image_epoch[p.obj]
            continue
        run = p.obj - images
        state.run_host_start[run] = starts[i]
        state.run_host_epoch[run] = state.run_epoch[run]
        state.run_host_columns[run] = state.run_committed[run]
        taken.append((starts[i], p.size * int(granules[p.item - 1])))
    return replace(state, arena=take_intervals(state.arena, taken))


def _degrade(state: PhysicalState, resolution: Resolution) -> PhysicalState:
    for c in resolution.dropped:
        if int(state.checkpoint_owner[c]) not in resolution.evicted:
            owner = OwnerId(int(state.checkpoint_owner[c]))
            state = trim_space(free_checkpoint(state, c), owner)
    for owner in resolution.evicted:
        state = free_owner(state, OwnerId(owner))
    return copied(state)


def _restore(state: PhysicalState, pieces: list[Piece], images: int) -> PhysicalState:
    for p in pieces:
        if not p.restores_h2d:
            continue
        if p.item == 0:
            slots = state.image_device[state.image_live]
            state.image_device[p.obj] = free_slot(
                slots, state.capacity.device_state_slots, "Device state slot"
            )
            state.image_device_epoch[p.obj] = state.image_epoch[p.obj]
        else:
            state = put_run(state, RunId(p.obj - images), Tier.BOTH)
    return copied(state)


def _activate(
    problem: Problem, state: PhysicalState, resolution: Resolution
) -> tuple[PhysicalState, OwnerId]:
    """Returns the state with the new active sequence bound to its pages, image and reservation (A-1)."""
    which = resolution.candidate
    source, candidate = problem.sources[which], problem.candidates[which]
    images, page = len(problem.state.image_live), state.capacity.page_tokens
    state, owner = new_owner(state, OwnerKind.ACTIVE)
    state.owner_reserved_pages[owner] = _growth(problem, which)
    if candidate.checkpoint is None:
        state, image = new_image(state, Tier.DEVICE)
        state.owner_reads[owner] = state.owner_writes[owner] = image
        return state, owner
    base = problem.state.checkpoint_kv_tokens[candidate.checkpoint]
    state.owner_frontier[owner] = base
    tails = {pool: (obj, from_host) for pool, obj, from_host in resolution.tail_copies}
    for pool in range(state.capacity.num_pools):
        pages = int(base[pool]) // page
        rows = [(r, s) for r, s in space(state, OwnerId(source.owner), pool) if s < pages]
        state = with_entries(state, [(owner, r, s) for r, s in rows])
        columns = int(base[pool]) % page
        if pool in tails:
            state, _ = new_run(state, owner, pool, pages, 1, columns, Tier.DEVICE, writer=owner)
        elif columns:
            run = resolution.tail_in_place[pool] - images
            state = copied(with_entries(state, [(owner, run, pages)]))
            # what lay behind the base belonged to released checkpoints and will be overwritten
            state.run_epoch[run] += 1
            state.run_device_epoch[run] = state.run_epoch[run]
            state.run_committed[run] = state.run_device_columns[run] = columns
            state.run_writer[run] = owner
    if resolution.forks:
        state, image = new_image(state, Tier.DEVICE)
        borrowed = state.image_device[source.image_obj] != NO_SLOT
        state.owner_writes[owner] = image
        state.owner_reads[owner] = source.image_obj if borrowed else image
        state.image_pins[source.image_obj] += int(borrowed)
    else:
        state.owner_reads[owner] = state.owner_writes[owner] = source.image_obj
        state.image_host[source.image_obj] = NO_SLOT
        state.image_epoch[source.image_obj] += 1
        state.image_device_epoch[source.image_obj] = state.image_epoch[source.image_obj]
    if not source.consume:
        state.edges[owner, source.owner] = True
        return state, owner
    return _hand_over(state, resolution, owner, OwnerId(source.owner))


def _hand_over(
    state: PhysicalState, resolution: Resolution, owner: OwnerId, source: OwnerId
) -> tuple[PhysicalState, OwnerId]:
    """Returns the state in which the consumed source's surviving checkpoints belong to the new lineage."""
    state = copied(state)
    for c in resolution.released:
        state.checkpoint_owner[c], state.checkpoint_image[c] = NO_OWNER, NO_IMAGE
    state.checkpoint_owner[checkpoints_of(state, source)] = owner
    for pool in range(state.capacity.num_pools):
        state = cut_space(state, source, pool, 0)
    state = copied(free_owner(state, source))
    state.owner_lineage[owner] = source
    return state, owner
