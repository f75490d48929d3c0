"""resolve: the exact end of every object in one target, and the arena recipe it needs (K-7, T-3).

Owns: object-by-object fates of a single target, in object space rather than tables, with partial runs cut;
the ordered Host releases and allocations; the exact feasibility. `projection` answers the same question for
thousands of targets as sums; both must agree, and tests hold them to it.

Letters: X objects (images first, then runs), V victims, J items, R axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from ninfer_jax.planner.capacity import HOST_KV
from ninfer_jax.planner.extents import Blocked, Placed, place
from ninfer_jax.planner.lineage import surviving_checkpoints
from ninfer_jax.planner.options import ReplicaAction
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.search_types import Assessment, Confirmation
from ninfer_jax.planner.sources import ImageRule, TailRule
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch


class When(IntEnum):
    """In which stage a replica is freed."""

    NEVER = 0
    NOW = 1  # HOST_RELEASES: nothing replaces it
    COPIED = 2  # COPY_PUBLICATION: after its Host replica is published
    LATE = 3  # COMMITTED: the consumed source keeps it until then


class Piece(NamedTuple):
    """One object, or a page range of one run, whose replicas change.

    Attributes:
        obj: object id; images are ids below `num_images`, runs follow.
        first, last: page range inside the run, half open; (0, 1) for an image.
        owner_row: smallest owner row among the inactive holders, for the canonical order.
        is_shared_owner: whether that owner is a shared prefix; those go first (design 3).
    """

    obj: int
    item: int
    first: int
    last: int
    on_device: bool
    on_host: bool
    had_device: bool
    had_host: bool
    frees_device: int  # When
    frees_host: int  # When
    copies_d2h: bool
    restores_h2d: bool
    owner_row: int
    is_shared_owner: bool

    @property
    def size(self) -> int:
        """Units of the piece."""
        return self.last - self.first


@dataclass(frozen=True)
class Resolution:
    """The complete physical meaning of one target.

    Attributes:
        pieces: changing objects in canonical order: shared victims first, then private, then row and object.
        tail_copies: (pool, object, from Host) of each partial tail page that is copied.
        tail_in_place: object that the sequence goes on writing, per pool; -1 if none.
        forks: whether the state is copied rather than moved (root: a new image).
        dropped: checkpoint rows deleted under pressure, evicted owners' included.
        evicted: owner rows.
        released: checkpoint rows that a consumed source loses.
    """

    candidate: int
    codes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    tail_copies: tuple[tuple[int, int, bool], ...]
    tail_in_place: tuple[int, ...]
    forks: bool
    dropped: tuple[int, ...]
    evicted: tuple[int, ...]
    degraded: tuple[int, ...]
    released: tuple[int, ...]


def resolve(problem: Problem, target: TargetBatch) -> Resolution:
    """Returns the exact fates of one target.

    Args:
        target: a batch of one, made for this problem.
    Raises:
        ValueError: if the batch has more than one row, or the source's code is not ABSENT.
    """
    if len(target) != 1:
        raise ValueError(f"resolve takes one target, got {len(target)}")
    which, codes = int(target.candidate[0]), target.codes[0]
    source = problem.source(which)
    absent = np.flatnonzero(codes == ABSENT).tolist()
    expected = [int(problem.source_victim[which])] if problem.source_victim[which] >= 0 else []
    if absent != expected:
        raise ValueError(f"victim rows {expected} of candidate {which} must be ABSENT, got {absent}")

    objects = problem.objects
    taken = _taken(problem, codes)
    touched = np.unique(np.concatenate([source.obj, taken.obj]))  # the only objects that can change
    device, host = objects.device[touched], objects.host[touched]
    mine, theirs = np.searchsorted(touched, source.obj), np.searchsorted(touched, taken.obj)
    keepers = objects.holders[touched] - np.bincount(theirs, minlength=len(touched))
    keepers[mine] -= len(expected)
    other_device = objects.fixed_device[touched] | (device & (keepers > 0))
    other_host = objects.fixed_host[touched] | (host & (keepers > 0))
    other_device[theirs[taken.wants_device]] = True
    other_host[theirs[taken.wants_host]] = True
    others = other_device | other_host
    need, hold_device, hold_host, late = np.zeros((4, len(touched)), bool)
    need[mine], hold_device[mine], hold_host[mine] = source.need, source.hold_device, source.hold_host
    late[mine] = source.consume
    copies: list[tuple[int, int, bool]] = []
    in_place: list[int] = []
    for pool, (tail, rule) in enumerate(zip(source.tail_obj, source.tail_rule, strict=True)):
        at = np.searchsorted(touched, tail)
        copied = rule == TailRule.COPY or (rule == TailRule.BY_OTHERS and bool(others[at]))
        if copied:
            copies.append((pool, tail, not bool(objects.device[tail])))
        elif rule != TailRule.NONE:
            need[at] = True
        in_place.append(tail if rule != TailRule.NONE and not copied else -1)
    forks = source.image_rule == ImageRule.FORK
    if source.image_rule == ImageRule.BY_OTHERS:
        at = np.searchsorted(touched, source.image_obj)
        forks = bool(others[at])
        need[at] |= not forks
    on_device = other_device | hold_device | need
    on_host = (other_host | hold_host) & (host | ~on_device)

    moved = (on_device != device) | (on_host != host)
    part = taken.is_part & ((taken.part_device != device[theirs]) | (taken.part_host != host[theirs]))
    sizes = objects.size[touched]
    pieces = _pieces(
        problem,
        np.concatenate([touched[moved], taken.obj[part]]),
        np.concatenate([np.zeros(int(moved.sum()), np.int32), (sizes[theirs] - taken.acted)[part]]),
        np.concatenate([on_device[moved], taken.part_device[part]]),
        np.concatenate([on_host[moved], taken.part_host[part]]),
        np.concatenate([late[moved], late[theirs][part]]),
    )
    return Resolution(
        which,
        tuple(codes.tolist()),
        pieces,
        tuple(copies),
        tuple(in_place),
        forks,
        *_logical(problem, which, codes),
    )


@dataclass(frozen=True, eq=False)
class _Taken:
    """What the degraded owners hold, and where their options still want it. Letter E: their entries."""

    obj: np.ndarray  # int32[E]
    wants_device: np.ndarray  # bool[E]
    wants_host: np.ndarray  # bool[E]
    acted: np.ndarray  # int32[E], last pages of the run that the option acts on
    is_part: np.ndarray  # bool[E], it acts on a part of the run
    part_device: np.ndarray  # bool[E], the acted part stays on Device
    part_host: np.ndarray  # bool[E]


def _taken(problem: Problem, codes: np.ndarray) -> _Taken:
    objects, entries = problem.objects, problem.entries
    if not (codes > ABSENT).any():
        none = np.zeros(0, bool)
        return _Taken(np.zeros(0, np.int32), none, none, np.zeros(0, np.int32), none, none, none)
    options = problem.options
    rows = np.flatnonzero(np.append(codes > ABSENT, False)[entries.victim])  # row -1 is no victim
    victim, obj = entries.victim[rows], entries.obj[rows]
    code, item, size = codes[victim], objects.item[obj], objects.size[obj]
    kept, acted = _one_option(problem, rows, victim, code, item)
    acted = np.where((objects.class_of[obj] >= 0) & (acted < size), 0, acted)
    action = np.where(item > 0, options.kv_action[code], options.state_action[code])
    device, host = objects.device[obj], objects.host[obj]
    both = device & host
    to_host = (action == ReplicaAction.DEMOTE) | ((action == ReplicaAction.DROP_DEVICE) & both)
    drop_host = (action == ReplicaAction.DROP_HOST) & both
    whole = kept & (acted == size)
    return _Taken(
        obj,
        kept & device & ~(whole & to_host),
        kept & ((host & ~(whole & drop_host)) | (whole & (action == ReplicaAction.DEMOTE))),
        acted,
        kept & (acted > 0) & (acted < size),
        device & ~to_host,
        (host & ~drop_host) | (action == ReplicaAction.DEMOTE),
    )


def _pieces(
    problem: Problem,
    obj: np.ndarray,
    first: np.ndarray,
    on_device: np.ndarray,
    on_host: np.ndarray,
    late: np.ndarray,
) -> tuple[Piece, ...]:
    """Returns the changes of objects (from page `first` on) in canonical order."""
    if not len(obj):
        return ()
    objects, holdings = problem.objects, problem.holdings
    item, had_device, had_host = objects.item[obj], objects.device[obj], objects.host[obj]
    copies = on_host & ~had_host
    without_copy = np.where(late, int(When.LATE), int(When.NOW))
    frees_device = np.where(copies & ~late, int(When.COPIED), without_copy)
    frees_device = np.where(had_device & ~on_device, frees_device, int(When.NEVER))
    frees_host = np.where(had_host & ~on_host, without_copy, int(When.NEVER))
    owner, is_shared = holdings.first_owner[obj], holdings.has_shared_owner[obj]
    order = np.lexsort((first, obj, item, owner, ~is_shared))
    columns = (
        obj,
        item,
        first,
        objects.size[obj],
        on_device,
        on_host,
        had_device,
        had_host,
        frees_device,
        frees_host,
        copies,
        on_device & ~had_device,
        owner,
        is_shared,
    )
    return tuple(map(Piece._make, zip(*(c[order].tolist() for c in columns), strict=True)))


def _logical(
    problem: Problem, which: int, codes: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns dropped checkpoint rows, evicted and degraded owner rows, released checkpoint rows."""
    state, holdings = problem.state, problem.holdings
    changed = np.flatnonzero(codes > ABSENT)
    dropped = np.zeros(0, np.int32)
    if len(changed):
        rows = problem.checkpoints
        victim, rank = holdings.victim_of[state.checkpoint_owner[rows]], holdings.rank[rows]
        code = np.append(codes, KEEP)[victim]  # row -1 is no victim
        gone = np.flatnonzero((code > ABSENT) & (problem.options.alive[victim, code] >> rank & 1 == 0))
        dropped = rows[gone[np.lexsort((rank[gone], victim[gone]))]]
    released: list[int] = []
    source = problem.source(which)
    if source.consume:
        checkpoint = problem.candidates[which].checkpoint
        assert checkpoint is not None
        mine = holdings.checkpoints_of(source.owner)
        released = mine[~surviving_checkpoints(state, checkpoint, mine)].tolist()
    evicted = problem.victims[np.flatnonzero(codes == EVICT)]
    return (
        tuple(dropped.tolist()),
        tuple(evicted.tolist()),
        tuple(problem.victims[changed].tolist()),
        tuple(released),
    )


def _one_option(
    problem: Problem, rows: np.ndarray, victim: np.ndarray, code: np.ndarray, item: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns bool[E] kept and int32[E] acted units of each entry under its owner's chosen option."""
    options, entries = problem.options, problem.entries
    pool = np.maximum(item - 1, 0)
    bits, start, end = entries.bits[rows], entries.start[rows], entries.end[rows]
    alive = options.alive[victim, code]
    image_kept = (bits & alive) != 0
    image_acted = image_kept & ((bits & alive & ~options.state_bits[victim, code]) == 0)
    run_kept = start < options.cover[victim, code, pool]
    run_acted = np.clip(end - np.maximum(start, options.kv_from[victim, code, pool]), 0, None)
    kept = np.where(item > 0, run_kept, image_kept)
    acted = np.where(item > 0, run_acted, image_acted).astype(np.int32)
    return kept, np.where(kept, acted, 0)


@dataclass(frozen=True)
class Recipe:
    """Arena recipe of one target: granule intervals released first, then extents in canonical order."""

    releases: tuple[tuple[int, int], ...]
    allocations: tuple[int, ...]
    pieces: tuple[Piece, ...]  # the piece of each allocation


@dataclass(frozen=True, eq=False)
class Placement:
    """One target resolved, and what the arena says to it."""

    resolution: Resolution
    recipe: Recipe
    answer: Placed | Blocked


def geometry_recipe(problem: Problem, resolution: Resolution) -> Recipe:
    """Returns what the target asks of the arena: HostReleases, then Main KV, then backend KV extents."""
    images, host_start = len(problem.state.image_live), problem.state.run_host_start
    granules = [0, *problem.state.capacity.page_granules().tolist()]
    now = int(When.NOW)
    releases, copies = [], []
    for p in resolution.pieces:
        if p.item > 0 and p.frees_host == now:
            g = granules[p.item]
            releases.append((int(host_start[p.obj - images]) + p.first * g, p.size * g))
        if p.item > 0 and p.copies_d2h:
            copies.append(p)
    copies.sort(key=lambda p: p.item)  # stable: canonical order within a pool
    return Recipe(tuple(releases), tuple(p.size * granules[p.item] for p in copies), tuple(copies))


def place_recipe(problem: Problem, resolution: Resolution) -> tuple[Recipe, Placed | Blocked]:
    """Returns the recipe and where its extents land, or which one is blocked."""
    recipe = geometry_recipe(problem, resolution)
    return recipe, place(problem.state.arena, recipe.releases, recipe.allocations)


def place_target(problem: Problem, target: TargetBatch) -> Placement:
    """Returns the target's resolution and the arena's answer."""
    resolution = resolve(problem, target)
    return Placement(resolution, *place_recipe(problem, resolution))


def confirm(
    problem: Problem, target: TargetBatch, assessment: Assessment, placement: Placement | None = None
) -> Confirmation:
    """Returns the exact feasibility of one assessed target (row 0 of a batch of one).

    A target without Host KV copies needs no geometry: its array test is already exact.

    Args:
        placement: of the target, if the caller has it.
    """
    residual = assessment.residual[0].copy()
    if assessment.d2h[0, 1:].any():
        answer = (placement or place_target(problem, target)).answer
        if isinstance(answer, Blocked):
            residual[HOST_KV] = max(int(residual[HOST_KV]), answer.missing)
    return Confirmation(not residual.any(), residual)
