"""seal: one chosen target becomes an ordered, immutable plan (X-1, R-10).

Owns: the canonical steps of a target, the work counts of one target, the absolute result. Sealing decides
nothing and executes nothing; `post_state` says what is true after each stage, and the program executes.
"""

from __future__ import annotations

import hashlib

import numpy as np
from ninfer_jax.planner.candidate import remaining_prefill
from ninfer_jax.planner.extents import Blocked
from ninfer_jax.planner.ids import (
    NO_SLOT,
    CheckpointRef,
    Generation,
    ImageId,
    OwnerId,
    Revision,
    RunId,
)
from ninfer_jax.planner.needs import growth_pages
from ninfer_jax.planner.plan import Action, Committed, Readiness, ResourcePlan, StageName, Step, VictimClaim
from ninfer_jax.planner.problem import Problem, base_tokens
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.resolution import (
    Piece,
    Placement,
    Recipe,
    Resolution,
    When,
    place_target,
    resolve,
)
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.sources import ImageRule
from ninfer_jax.planner.state import PhysicalState, checkpoint_ref
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
    problem: Problem,
    target: TargetBatch,
    *,
    intent: tuple[int, ...] = (),
    assessment: Assessment | None = None,
    placement: Placement | None = None,
) -> ResourcePlan | Blocked | None:
    """Returns the sealed plan of one target; Blocked if the arena refuses it, None if an axis does.

    Args:
        target: a batch of one.
        intent: the caller's final schedule intent, consumed here; a plan has no mutation API (G-3).
        assessment, placement: of the target, if the caller has them already.
    """
    assessment = assess_numpy(problem, target) if assessment is None else assessment
    if not bool(assessment.fits[0]):
        return None
    placement = placement or place_target(problem, target)
    resolution, recipe, placed = placement.resolution, placement.recipe, placement.answer
    if isinstance(placed, Blocked):
        return placed
    state, which = problem.state, resolution.candidate
    checkpoint = problem.candidates[which].checkpoint
    readiness = Readiness.NEEDS_TRANSFER
    if not assessment.degraded[0] and not assessment.h2d[0].any():
        readiness = Readiness.READY
    return ResourcePlan(
        _plan_id(problem, resolution, intent),
        Revision(state.revision),
        problem.candidates[which],
        None if checkpoint is None else checkpoint_ref(state, checkpoint),
        _claims(state, resolution),
        _steps(problem, resolution, recipe, placed.starts),
        assessment.used[0],
        immediate_work(problem, which, assessment, 0),
        base_tokens(problem, which),
        readiness,
        intent,
    )


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


def _claims(state: PhysicalState, resolution: Resolution) -> tuple[VictimClaim, ...]:
    """Returns the exact claim on every degraded owner (X-8)."""
    dropped: dict[int, list[CheckpointRef]] = {owner: [] for owner in resolution.degraded}
    owners = state.checkpoint_owner[list(resolution.dropped)].tolist() if resolution.dropped else []
    for c, owner in zip(resolution.dropped, owners, strict=True):
        dropped[owner].append(checkpoint_ref(state, c))
    evicted = set(resolution.evicted)
    generations = state.owner_generation[list(dropped)].tolist() if dropped else []
    return tuple(
        VictimClaim(OwnerId(owner), Generation(generation), owner in evicted, tuple(refs))
        for (owner, refs), generation in zip(dropped.items(), generations, strict=True)
    )


def _steps(
    problem: Problem, resolution: Resolution, recipe: Recipe, starts: tuple[int, ...]
) -> tuple[Step, ...]:
    state, images = problem.state, len(problem.state.image_live)
    source = problem.source(resolution.candidate)
    pieces = resolution.pieces
    s, a = StageName, Action
    steps: list[Step] = []

    def on(stage: StageName, action: Action, p: Piece, host_start: int = -1) -> Step:
        if p.item == 0:
            return Step(stage, action, None, ImageId(p.obj), None, None, -1, (0, 0), host_start)
        run, pages = RunId(p.obj - images), (p.first, p.last)
        return Step(stage, action, None, None, run, None, p.item - 1, pages, host_start)

    evicted = set(resolution.evicted)
    for owner in resolution.evicted:
        steps.append(Step(s.HOST_RELEASES, a.EVICT_OWNER, owner=OwnerId(owner)))
    for c in resolution.dropped:
        if int(state.checkpoint_owner[c]) not in evicted:
            steps.append(Step(s.HOST_RELEASES, a.DROP_CHECKPOINT, checkpoint=checkpoint_ref(state, c)))
    now, after_copy, late = int(When.NOW), int(When.COPIED), int(When.LATE)
    for p in pieces:
        if p.frees_host == now:
            steps.append(on(s.HOST_RELEASES, a.RELEASE_HOST, p))
        if p.frees_device == now:
            steps.append(on(s.HOST_RELEASES, a.RELEASE_DEVICE, p))
    copies = [(p, -1) for p in pieces if p.item == 0 and p.copies_d2h]
    copies += list(zip(recipe.pieces, starts, strict=True))
    steps += [on(s.COPY_PREPARATION, a.RESERVE_HOST, p, start) for p, start in copies]
    steps += [on(s.COPIES_IN_FLIGHT, a.COPY_D2H, p, start) for p, start in copies]
    steps += [on(s.COPY_PUBLICATION, a.PUBLISH_HOST, p, start) for p, start in copies]
    steps += [on(s.COPY_PUBLICATION, a.RELEASE_DEVICE, p) for p in pieces if p.frees_device == after_copy]
    steps += [on(s.RESTORE, a.RESTORE_H2D, p) for p in pieces if p.restores_h2d]
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
    used_objects = source.obj[source.need]
    items, sizes = problem.objects.item[used_objects].tolist(), problem.objects.size[used_objects].tolist()
    for o, item, size in zip(used_objects.tolist(), items, sizes, strict=True):
        if item > 0:
            run = RunId(o - images)
            steps.append(Step(s.COMMITTED, a.TAKE_PAGES, run=run, pool=item - 1, pages=(0, size)))
    for pool, growth in enumerate(_growth(problem, resolution.candidate)):
        steps.append(Step(s.COMMITTED, a.RESERVE_GROWTH, pool=pool, pages=(0, growth)))
    if source.consume:
        steps.append(Step(s.COMMITTED, a.CONSUME_OWNER, owner=OwnerId(source.owner)))
        steps += [
            Step(s.COMMITTED, a.DROP_CHECKPOINT, checkpoint=checkpoint_ref(state, c))
            for c in resolution.released
        ]
    for p in pieces:
        if p.frees_host == late:
            steps.append(on(s.COMMITTED, a.RELEASE_HOST, p))
        if p.frees_device == late:
            steps.append(on(s.COMMITTED, a.RELEASE_DEVICE, p))
    return tuple(steps)


def _growth(problem: Problem, which: int) -> list[int]:
    state, candidate = problem.state, problem.candidates[which]
    base = None if candidate.checkpoint is None else state.checkpoint_kv_tokens[candidate.checkpoint]
    return growth_pages(state.capacity, candidate, base)
