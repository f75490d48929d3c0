"""resolve: the exact end of every object in one target, and the arena recipe it needs (K-7, T-3).

Owns: object-by-object fates of a single target, in object space rather than tables, with partial runs cut;
the ordered Host releases and allocations; the exact feasibility. `projection` answers the same question for
thousands of targets as sums; both must agree, and tests hold them to it.

Letters: X objects (images first, then runs), V victims, J items, R axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from ninfer_jax.planner.capacity import HOST_KV
from ninfer_jax.planner.extents import Blocked, Placed, place
from ninfer_jax.planner.ids import OwnerId, OwnerKind
from ninfer_jax.planner.lineage import surviving_checkpoints
from ninfer_jax.planner.options import ReplicaAction
from ninfer_jax.planner.problem import ImageRule, Problem, TailRule
from ninfer_jax.planner.search_types import Assessment, Confirmation
from ninfer_jax.planner.state import checkpoints_of
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch


class When(IntEnum):
    """In which stage a replica is freed."""

    NEVER = 0
    NOW = 1  # HOST_RELEASES: nothing replaces it
    COPIED = 2  # COPY_PUBLICATION: after its Host replica is published
    LATE = 3  # COMMITTED: the consumed source keeps it until then


@dataclass(frozen=True)
class Piece:
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
    frees_device: When
    frees_host: When
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
    source = problem.sources[which]
    absent = np.flatnonzero(codes == ABSENT)
    expected = [int(problem.source_victim[which])] if problem.source_victim[which] >= 0 else []
    if absent.tolist() != expected:
        raise ValueError(f"victim rows {expected} of candidate {which} must be ABSENT, got {absent.tolist()}")

    objects, entries, options = problem.objects, problem.entries, problem.options
    rows = np.flatnonzero(entries.victim >= 0)
    victim = entries.victim[rows]
    code = codes[victim]
    rows, victim, code = rows[code != ABSENT], victim[code != ABSENT], code[code != ABSENT]
    obj = entries.obj[rows]
    item, size = objects.item[obj], objects.size[obj]
    kept, acted = _one_option(problem, rows, victim, code, item)
    lone = objects.class_of[obj] < 0
    acted = np.where(~lone & (acted < size), 0, acted)
    action = np.where(item > 0, options.kv_action[code], options.state_action[code])
    device, host = objects.device[obj], objects.host[obj]
    both = device & host
    to_host = (action == ReplicaAction.DEMOTE) | ((action == ReplicaAction.DROP_DEVICE) & both)
    drop_host = (action == ReplicaAction.DROP_HOST) & both
    whole = kept & (acted == size)
    part = kept & (acted > 0) & (acted < size)
    wants_device = kept & device & ~(whole & to_host)
    wants_host = kept & ((host & ~(whole & drop_host)) | (whole & (action == ReplicaAction.DEMOTE)))

    x = len(objects.item)
    other_device, other_host = objects.fixed_device.copy(), objects.fixed_host.copy()
    other_device[obj[wants_device]] = True
    other_host[obj[wants_host]] = True
    others = other_device | other_host
    need, hold_device, hold_host, late = (np.zeros(x, bool) for _ in range(4))
    need[source.obj] = source.need
    hold_device[source.obj], hold_host[source.obj] = source.hold_device, source.hold_host
    late[source.obj] = source.consume
    copies: list[tuple[int, int, bool]] = []
    in_place: list[int] = []
    for pool, (tail, rule) in enumerate(zip(source.tail_obj, source.tail_rule, strict=True)):
        copied = rule == TailRule.COPY or (rule == TailRule.BY_OTHERS and bool(others[tail]))
        if copied:
            copies.append((pool, tail, not bool(objects.device[tail])))
        elif rule != TailRule.NONE:
            need[tail] = True
        in_place.append(tail if rule != TailRule.NONE and not copied else -1)
    image = source.image_obj
    forks = source.image_rule == ImageRule.FORK
    if source.image_rule == ImageRule.BY_OTHERS:
        forks = bool(others[image])
        need[image] |= not forks
    on_device = other_device | hold_device | need
    on_host = (other_host | hold_host) & (objects.host | ~on_device)

    # objects that nobody in the domain holds keep what they have
    touched = objects.holders > 0
    touched[source.obj] = True
    changed = touched & ((on_device != objects.device) | (on_host != objects.host))
    first_owner = np.full(x, np.iinfo(np.int32).max, np.int64)
    np.minimum.at(first_owner, entries.obj[entries.victim >= 0], entries.owner[entries.victim >= 0])
    is_shared = np.zeros(x, bool)
    shared_owner = problem.state.owner_kind[entries.owner] == OwnerKind.SHARED
    is_shared[entries.obj[shared_owner & (entries.victim >= 0)]] = True

    def piece(o: int, first: int, last: int, dev: bool, hst: bool) -> Piece:
        had_device, had_host = bool(objects.device[o]), bool(objects.host[o])
        copies_d2h = hst and not had_host
        freed_device = When.NEVER
        if had_device and not dev:
            freed_device = When.LATE if late[o] else (When.COPIED if copies_d2h else When.NOW)
        freed_host = When.NEVER
        if had_host and not hst:
            freed_host = When.LATE if late[o] else When.NOW
        return Piece(
            o,
            int(objects.item[o]),
            first,
            last,
            dev,
            hst,
            had_device,
            had_host,
            freed_device,
            freed_host,
            copies_d2h,
            dev and not had_device,
            int(first_owner[o]),
            bool(is_shared[o]),
        )

    pieces = [
        piece(int(o), 0, int(objects.size[o]), bool(on_device[o]), bool(on_host[o]))
        for o in np.flatnonzero(changed)
    ]
    for e in np.flatnonzero(part):
        o = int(obj[e])
        dev = bool(device[e]) and not bool(to_host[e])
        hst = bool((host[e] and not drop_host[e]) or action[e] == ReplicaAction.DEMOTE)
        if dev != bool(objects.device[o]) or hst != bool(objects.host[o]):
            pieces.append(piece(o, int(size[e] - acted[e]), int(size[e]), dev, hst))
    pieces.sort(key=lambda p: (not p.is_shared_owner, p.owner_row, p.item, p.obj, p.first))
    return Resolution(
        which,
        tuple(int(c) for c in codes),
        tuple(pieces),
        tuple(copies),
        tuple(in_place),
        forks,
        *_logical(problem, which, codes),
    )


def _logical(
    problem: Problem, which: int, codes: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns dropped checkpoint rows, evicted and degraded owner rows, released checkpoint rows."""
    state, options = problem.state, problem.options
    dropped, evicted, degraded = [], [], []
    for v in np.flatnonzero((codes != KEEP) & (codes != ABSENT)):
        owner, code = int(problem.victims[v]), int(codes[v])
        degraded.append(owner)
        if code == EVICT:
            evicted.append(owner)
        alive = int(options.alive[v, code])
        rows = checkpoints_of(state, OwnerId(owner))
        dropped += [int(c) for i, c in enumerate(rows) if not alive >> i & 1]
    released: list[int] = []
    source = problem.sources[which]
    if source.consume:
        checkpoint = problem.candidates[which].checkpoint
        assert checkpoint is not None
        rows = checkpoints_of(state, OwnerId(source.owner))
        stays = surviving_checkpoints(state, checkpoint)
        released = [int(c) for c, s in zip(rows, stays, strict=True) if not s]
    return tuple(dropped), tuple(evicted), tuple(degraded), tuple(released)


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


def geometry_recipe(problem: Problem, resolution: Resolution) -> Recipe:
    """Returns what the target asks of the arena: HostReleases, then Main KV, then backend KV extents."""
    state, images = problem.state, len(problem.state.image_live)
    granules = state.capacity.page_granules()
    releases = []
    for p in resolution.pieces:
        if p.item > 0 and p.frees_host == When.NOW:
            g = int(granules[p.item - 1])
            releases.append((int(state.run_host_start[p.obj - images]) + p.first * g, p.size * g))
    copies = [p for p in resolution.pieces if p.item > 0 and p.copies_d2h]
    copies.sort(key=lambda p: p.item)  # stable: canonical order within a pool
    return Recipe(tuple(releases), tuple(p.size * int(granules[p.item - 1]) for p in copies), tuple(copies))


def place_recipe(problem: Problem, resolution: Resolution) -> tuple[Recipe, Placed | Blocked]:
    """Returns the recipe and where its extents land, or which one is blocked."""
    recipe = geometry_recipe(problem, resolution)
    return recipe, place(problem.state.arena, recipe.releases, recipe.allocations)


def confirm(problem: Problem, target: TargetBatch, assessment: Assessment) -> Confirmation:
    """Returns the exact feasibility of one assessed target (row 0 of a batch of one).

    A target without Host KV copies needs no geometry: its array test is already exact.
    """
    residual = assessment.residual[0].copy()
    if assessment.d2h[0, 1:].any():
        _, answer = place_recipe(problem, resolve(problem, target))
        if isinstance(answer, Blocked):
            residual[HOST_KV] = max(int(residual[HOST_KV]), answer.missing)
    return Confirmation(not residual.any(), residual)
