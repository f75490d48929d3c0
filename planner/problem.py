"""One planning round as tables: what every option of every victim does, and what every candidate needs.

Owns: `Problem` and `make_problem` (design 3.1), vectorised NumPy over victims, options and address-space
entries. Owns no choice and no price. Rebuilt once per round; cost follows entries x options, never pages.

Every object (StateImage or page run) falls into one of three groups:

    one victim alone holds it          -> its fate is that owner's option: summed up in `contributions`
    two or more, or a victim and an    -> a *class*: options say in `device_mask/host_mask` whether the owner
    active or protected holder            still needs it there; the fate is the OR over all holders (T-6)
    nobody eligible holds it           -> nothing changes, except for the candidate whose source it is

The final Device replica of a class survives while any holder wants it there. A holder that demoted a class is
also served by somebody else's Device replica, so a Host copy is made only when the Device replica goes.

A candidate's source is no victim of that candidate: its row must carry the code ABSENT, and what it keeps,
hands over or releases is in the candidate's own columns and masks (G-8, N-9). A consumed source stays whole
until the commit: everything it loses is freed in the last stage (X-9).

Letters: V victims, K options, C classes, D candidates, J items, N pools, R axes, W mask words, P columns of
`contributions`, F columns of `needs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import jax
import numpy as np
from ninfer_jax.planner.candidate import Candidate, Disposition
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE
from ninfer_jax.planner.contributions import (
    NUM_CONTRIBUTIONS,
    class_masks,
    lone_contributions,
)
from ninfer_jax.planner.holders import Entries, Objects, checkpoint_ranks, make_entries, make_objects
from ninfer_jax.planner.ids import (
    NO_CLASS,
    NO_OWNER,
    OwnerKind,
)
from ninfer_jax.planner.lineage import surviving_checkpoints
from ninfer_jax.planner.options import (
    MAX_CHECKPOINTS,
    OptionTable,
    Survivors,
    make_templates,
    survivors_of,
    template_columns,
)
from ninfer_jax.planner.state import PhysicalState, eligible, used
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch, make_targets

# column groups of `needs`, each J wide
H2D, H2D_OPS, TAIL_H2D, TAIL_D2D, FRESH, DEVICE_LATE, HOST_LATE, GROWTH, STATE_IS_FORK = range(9)
NUM_NEEDS: Final = 9

CLASS_BUCKETS: Final = (32, 64, 128, 256, 512, 1024, 2048)
VICTIM_BUCKETS: Final = (8, 16, 64, 128, 256, 512, 1024)
OPTION_BUCKETS: Final = (16, 32, 64, 128)
CANDIDATE_BUCKETS: Final = (8, 16, 32, 64, 128)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Tables:
    """The arrays that the projection reads, padded to buckets so that few shapes are ever compiled."""

    contributions: (
        np.ndarray
    )  # int32[V, K, 5 * J + 2]: five groups of J, then evictions and dropped checkpoints
    device_mask: np.ndarray  # uint32[V, K, W], bit c: the owner still needs class c on Device
    host_mask: np.ndarray  # uint32[V, K, W]
    class_units: np.ndarray  # int32[C, J], size of the class in its item's column
    class_device: np.ndarray  # bool[C], on Device now
    class_host: np.ndarray  # bool[C], on Host now
    fixed_device: np.ndarray  # bool[C], an owner outside the domain needs it on Device
    fixed_host: np.ndarray  # bool[C]
    needs: np.ndarray  # int32[D, 9 * J]
    need_class: np.ndarray  # bool[D, C], the sequence will use it on Device (restored if it is not)
    hold_device: np.ndarray  # bool[D, C], the source keeps it there
    hold_host: np.ndarray  # bool[D, C]
    late_class: np.ndarray  # bool[D, C], held by a consumed source until commit
    tail_class: np.ndarray  # int32[D, N], partial tail page whose owner decides in place or copy; or NO_CLASS
    image_class: np.ndarray  # int32[D], source image whose other holders decide Move or Fork; or NO_CLASS
    used0: np.ndarray  # int32[R]
    capacity: np.ndarray  # int32[R]
    granules: np.ndarray  # int32[N]
    staging: np.ndarray  # int32[J]


class TailRule(IntEnum):
    """What happens to the partial tail page of one pool when the sequence starts to write (S-2, K-4)."""

    NONE = 0  # aligned, or nothing reused
    IN_PLACE = 1  # consumed and nobody else's: the sequence goes on writing
    COPY = 2  # somebody keeps it: one page is copied (partial-tail COW)
    BY_OTHERS = 3  # consumed; COPY iff another holder survives in the target


class ImageRule(IntEnum):
    """How the sequence gets its state image (S-3)."""

    NEW = 0  # root
    MOVE = 1
    FORK = 2
    BY_OTHERS = 3  # FORK iff another holder survives in the target


@dataclass(frozen=True, eq=False)
class SourceView:
    """What one candidate's source keeps, hands over and leaves to others. Letter M: objects of the source."""

    owner: int
    consume: bool
    obj: np.ndarray  # int32[M]
    need: np.ndarray  # bool[M], used by the sequence on Device
    hold_device: np.ndarray  # bool[M], the source's survivors keep it there
    hold_host: np.ndarray  # bool[M]
    tail_obj: tuple[int, ...]  # partial tail page of each pool, or -1
    tail_rule: tuple[TailRule, ...]
    image_obj: int
    image_rule: ImageRule


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything one planning round needs. Immutable; valid for `state.revision` only (G-12)."""

    state: PhysicalState
    candidates: tuple[Candidate, ...]
    victims: np.ndarray  # int32[V], owner row of each victim row
    checkpoints: np.ndarray  # int32[Q], every live checkpoint row
    source_victim: np.ndarray  # int32[D], victim row of the source, or -1
    sources: tuple[SourceView, ...]
    options: OptionTable
    entries: Entries
    objects: Objects
    tables: Tables

    @property
    def num_victims(self) -> int:
        """V without padding."""
        return len(self.victims)

    @property
    def num_options(self) -> int:
        """K without padding."""
        return len(self.options.templates)


def make_problem(
    state: PhysicalState, candidates: Sequence[Candidate], *, max_options: int | None = None
) -> Problem:
    """Returns the tables of one round.

    Args:
        candidates: root first; each with its own request work.
        max_options: options per owner; None takes 16 for many owners and up to 64 for few.
    Raises:
        ValueError: if there is no candidate, a source is not a live inactive checkpoint, or a consumed source
            is protected.

    >>> from ninfer_jax.planner.candidate import make_request, root_candidate
    >>> from ninfer_jax.planner.capacity import make_capacity
    >>> from ninfer_jax.planner.state import make_state
    >>> state = make_state(make_capacity(device_state_slots=2, device_pages=12))
    >>> make_problem(state, [root_candidate(make_request(100, 50))]).num_victims
    0
    """
    if not candidates:
        raise ValueError("a problem needs at least the root candidate")
    may_go = eligible(state)
    victims = np.flatnonzero(may_go).astype(np.int32)
    victim_of = np.full(state.num_owners, -1, np.int32)
    victim_of[victims] = np.arange(len(victims), dtype=np.int32)
    rank, counts = checkpoint_ranks(state)
    if counts.max(initial=0) > MAX_CHECKPOINTS:
        raise ValueError(f"an owner has {counts.max()} checkpoints, at most {MAX_CHECKPOINTS} are supported")
    entries = make_entries(state, victim_of, rank)
    objects = make_objects(state, entries, may_go)
    used0 = used(state)
    sources, needs, deficits = _make_candidates(state, candidates, may_go, entries, objects, used0)
    per_owner = int(counts[victims].max(initial=1))
    if max_options is None:
        max_options = min(64, max(16, 1024 // max(len(victims), 1)))
    options = _make_options(
        state, victims, counts, rank, make_templates(per_owner, max_options), deficits, entries, objects
    )
    tables, valid = _make_tables(state, victims, counts, options, entries, objects, needs, used0)
    options = replace(options, valid=valid)
    source_victim = np.asarray([victim_of[s.owner] if s.owner >= 0 else -1 for s in sources], np.int32)
    return Problem(
        state,
        tuple(candidates),
        victims,
        np.flatnonzero(state.checkpoint_owner != NO_OWNER).astype(np.int32),
        source_victim,
        sources,
        options,
        entries,
        objects,
        tables,
    )


def identity_targets(problem: Problem) -> TargetBatch:
    """Returns one target per candidate: activation and source disposition, nothing else (T-4)."""
    codes = np.full((len(problem.candidates), problem.num_victims), KEEP, np.int32)
    return make_targets(np.arange(len(problem.candidates)), _with_source(problem, codes))


def maximal_targets(problem: Problem) -> TargetBatch:
    """Returns one target per candidate that releases everything its domain may release (G-4 for root)."""
    codes = np.full((len(problem.candidates), problem.num_victims), EVICT, np.int32)
    return make_targets(np.arange(len(problem.candidates)), _with_source(problem, codes))


def base_tokens(problem: Problem, candidate: int) -> int:
    """Returns the prompt tokens that the candidate reuses."""
    checkpoint = problem.candidates[candidate].checkpoint
    return 0 if checkpoint is None else int(problem.state.checkpoint_frontier[checkpoint])


def _with_source(problem: Problem, codes: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(problem.source_victim >= 0)
    codes[rows, problem.source_victim[rows]] = ABSENT
    return codes


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True, eq=False)
class _Needs:
    """The candidate half of the tables, unpadded."""

    needs: np.ndarray
    need_class: np.ndarray
    hold_device: np.ndarray
    hold_host: np.ndarray
    late_class: np.ndarray
    tail_class: np.ndarray
    image_class: np.ndarray


def _make_candidates(
    state: PhysicalState,
    candidates: Sequence[Candidate],
    may_go: np.ndarray,
    entries: Entries,
    objects: Objects,
    used0: np.ndarray,
) -> tuple[tuple[SourceView, ...], _Needs, np.ndarray]:
    """Returns the view of each source, the candidates' needs, and int32[D, R] identity deficits."""
    pools = state.capacity.num_pools
    items, num_classes, d = 1 + pools, int((objects.class_of >= 0).sum()), len(candidates)
    out = _Needs(
        np.zeros((d, NUM_NEEDS, items), np.int32),
        np.zeros((d, num_classes), bool),
        np.zeros((d, num_classes), bool),
        np.zeros((d, num_classes), bool),
        np.zeros((d, num_classes), bool),
        np.full((d, pools), NO_CLASS, np.int32),
        np.full(d, NO_CLASS, np.int32),
    )
    views: list[SourceView] = []
    page = state.capacity.page_tokens
    for i, candidate in enumerate(candidates):
        tokens = candidate.request.capacity_tokens
        if len(tokens) != pools:
            raise ValueError(f"candidate {i} asks for {len(tokens)} pools, the state has {pools}")
        total = -(-np.asarray(tokens) // page)
        if candidate.checkpoint is None:
            views.append(_root_view(pools))
            out.needs[i, FRESH, 0] = 1
            out.needs[i, GROWTH, 1:] = total
            continue
        view = _source_view(state, i, candidate, may_go, entries, objects)
        base = state.checkpoint_kv_tokens[candidate.checkpoint]
        out.needs[i, GROWTH, 1:] = np.maximum(total - -(-base // page), 0)
        _fill_needs(objects, out, i, view)
        views.append(view)
    shared = objects.class_of >= 0
    device = out.needs[:, [H2D, TAIL_H2D, TAIL_D2D, FRESH, GROWTH]].sum(1) - out.needs[:, DEVICE_LATE]
    restored = out.need_class & ~objects.device[shared]
    for item in range(items):
        device[:, item] += (restored * (objects.size[shared] * (objects.item[shared] == item))).sum(1)
    missing = np.tile(used0, (d, 1)) - state.capacity.units()
    missing[:, DEVICE_STATE] += device[:, 0]
    missing[:, DEVICE_PAGES:] += device[:, 1:]
    return tuple(views), out, np.maximum(missing, 0).astype(np.int32)


def _root_view(pools: int) -> SourceView:
    nothing = np.zeros(0, np.int32)
    none = np.zeros(0, bool)
    return SourceView(
        NO_OWNER, False, nothing, none, none, none, (-1,) * pools, (TailRule.NONE,) * pools, -1, ImageRule.NEW
    )


def _source_view(
    state: PhysicalState,
    i: int,
    candidate: Candidate,
    may_go: np.ndarray,
    entries: Entries,
    objects: Objects,
) -> SourceView:
    """Returns what candidate i's source keeps, hands over and leaves to others (R-9, S-3, N-9)."""
    assert candidate.checkpoint is not None
    page, pools = state.capacity.page_tokens, state.capacity.num_pools
    source = int(candidate.checkpoint)
    owner = int(state.checkpoint_owner[source]) if 0 <= source < len(state.checkpoint_owner) else NO_OWNER
    if owner == NO_OWNER or state.owner_kind[owner] not in (OwnerKind.PRIVATE, OwnerKind.SHARED):
        raise ValueError(f"candidate {i}: checkpoint row {source} belongs to no inactive owner")
    consume = candidate.disposition == Disposition.CONSUME
    if consume and (not may_go[owner] or state.owner_kind[owner] == OwnerKind.SHARED):
        raise ValueError(f"candidate {i}: owner {owner} is shared or protected and cannot be consumed")
    base = state.checkpoint_kv_tokens[source]

    mine = np.flatnonzero(entries.owner == owner)
    item = objects.item[entries.obj[mine]]
    is_run, is_image = mine[item > 0], mine[item == 0]
    runs, start, item = entries.obj[is_run], entries.start[is_run], item[item > 0]
    base_of = base[item - 1]
    need = entries.end[is_run] <= base_of // page
    tails, rules = [-1] * pools, [TailRule.NONE] * pools
    for e in np.flatnonzero((base_of % page > 0) & (start == base_of // page)):
        obj, pool = int(runs[e]), int(item[e]) - 1
        tails[pool] = obj
        # whether an owner outside the domain holds it too; a protected source itself counts as such
        if not consume or objects.fixed_device[obj] or objects.fixed_host[obj]:
            rules[pool] = TailRule.COPY
        elif objects.class_of[obj] >= 0:
            rules[pool] = TailRule.BY_OTHERS
        else:
            rules[pool] = TailRule.IN_PLACE
            need[e] = True

    images, bits = entries.obj[is_image], entries.bits[is_image]
    stays = surviving_checkpoints(state, source) if consume else np.ones(MAX_CHECKPOINTS + 1, bool)
    alive = sum(1 << k for k in range(len(stays)) if stays[k])
    held = (bits & np.int64(alive)) != 0
    chosen = images == state.checkpoint_image[source]
    image = int(state.checkpoint_image[source])
    fixed = objects.fixed_device[image] or objects.fixed_host[image]
    if (held & chosen).any() or fixed or not may_go[owner]:
        rule = ImageRule.FORK
    elif objects.class_of[image] >= 0:
        rule = ImageRule.BY_OTHERS
    else:
        rule = ImageRule.MOVE
    moves = chosen & (rule == ImageRule.MOVE)
    kept = np.full(len(runs), not consume)
    both = np.concatenate([runs, images])
    return SourceView(
        owner,
        consume,
        both,
        np.concatenate([need, moves]),
        np.concatenate([kept, held | (chosen & ~moves)]) & objects.device[both],
        np.concatenate([kept, held]) & objects.host[both],
        tuple(tails),
        tuple(rules),
        image,
        rule,
    )


def _fill_needs(objects: Objects, out: _Needs, i: int, view: SourceView) -> None:
    """Writes candidate i's row: classes become masks, everything else is a constant."""
    row, obj, need = out.needs[i], view.obj, view.need
    for pool, (tail, rule) in enumerate(zip(view.tail_obj, view.tail_rule, strict=True)):
        if rule == TailRule.COPY:
            row[TAIL_D2D if objects.device[tail] else TAIL_H2D, pool + 1] += 1
        elif rule == TailRule.BY_OTHERS:
            out.tail_class[i, pool] = objects.class_of[tail]
    if view.image_rule == ImageRule.FORK:
        row[TAIL_D2D if objects.device[view.image_obj] else TAIL_H2D, 0] += 1
        row[STATE_IS_FORK, 0] = 1
    elif view.image_rule == ImageRule.BY_OTHERS:
        out.image_class[i] = objects.class_of[view.image_obj]
    device, host, classes = objects.device[obj], objects.host[obj], objects.class_of[obj]
    shared = classes >= 0
    out.need_class[i, classes[shared]] = need[shared]
    out.hold_device[i, classes[shared]] = view.hold_device[shared]
    out.hold_host[i, classes[shared]] = view.hold_host[shared]
    out.late_class[i, classes[shared]] = view.consume
    stays_device = view.hold_device | objects.fixed_device[obj] | need
    stays_host = (view.hold_host | objects.fixed_host[obj]) & (host | ~stays_device)
    item, size = objects.item[obj], objects.size[obj]
    restored = need & ~device & ~shared
    np.add.at(row[H2D], item[restored], size[restored])
    np.add.at(row[H2D_OPS], item[restored], 1)
    if view.consume:
        late_device, late_host = device & ~stays_device & ~shared, host & ~stays_host & ~shared
        np.add.at(row[DEVICE_LATE], item[late_device], size[late_device])
        np.add.at(row[HOST_LATE], item[late_host], size[late_host])


# ---------------------------------------------------------------- options and tables


def _make_options(
    state: PhysicalState,
    victims: np.ndarray,
    counts: np.ndarray,
    rank: np.ndarray,
    templates: tuple,
    deficits: np.ndarray,
    entries: Entries,
    objects: Objects,
) -> OptionTable:
    pools, page = state.capacity.num_pools, state.capacity.page_tokens
    v = len(victims)
    m = int(counts[victims].max(initial=1))
    count = counts[victims]
    # pages[v, r, n]: pages of pool n that the checkpoints up to rank r need
    pages = np.zeros((v, m + 1, pools), np.int32)
    rows = np.flatnonzero(rank >= 0)
    victim_of = np.full(state.num_owners, -1, np.int32)
    victim_of[victims] = np.arange(v)
    where = victim_of[state.checkpoint_owner[rows]]
    rows, where = rows[where >= 0], where[where >= 0]
    pages[where, rank[rows] + 1] = -(-state.checkpoint_kv_tokens[rows] // page)
    reach = np.maximum.accumulate(pages, axis=1)

    free_state = np.asarray(deficits[:, DEVICE_STATE].max(initial=0))
    large = deficits[:, DEVICE_PAGES:].max(0, initial=0)
    positive = np.where(deficits[:, DEVICE_PAGES:] > 0, deficits[:, DEVICE_PAGES:], np.iinfo(np.int32).max)
    small = np.where(large > 0, positive.min(0, initial=np.iinfo(np.int32).max), 0)
    tails = _tail_starts(v, pools, reach[:, -1], (large, small), entries, objects)
    drop = _sized_drop(v, m, pools, count, reach, large, int(free_state), entries, objects)

    rules = template_columns(templates)
    alive = survivors_of(templates, count, drop)
    alive[:, ABSENT] = 0
    # coverage is the longest one that any surviving checkpoint needs; ranks follow the frontier, but a typed
    # frontier of a shallower checkpoint may still be the longer one
    has = (alive[:, :, None] >> np.arange(m, dtype=np.int32)) & 1
    cover = (has[..., None] * pages[:, None, 1:]).max(2, initial=0)
    first = np.int32((1 << max(int(free_state), 1)) - 1 if int(free_state) < MAX_CHECKPOINTS else -1)
    state_bits = np.tile(np.where(rules.state_extent == 0, np.int32(-1), first), (v, 1))
    starts = np.stack([np.zeros((v, pools), np.int32), *tails], 1)
    valid = (alive != 0) | (rules.survivors == int(Survivors.NOBODY))
    valid[:, ABSENT] = False
    return OptionTable(
        templates, alive, rules.state, state_bits, rules.kv, starts[:, rules.kv_extent], cover, valid
    )


def _tail_starts(
    v: int,
    pools: int,
    total: np.ndarray,
    sizes: tuple[np.ndarray, np.ndarray],
    entries: Entries,
    objects: Objects,
) -> list[np.ndarray]:
    """Returns per size int32[V, N]: the page from which demoting the tail frees that many pages."""
    out = []
    item = objects.item[entries.obj]
    for size in sizes:
        starts = np.where(np.asarray(size)[None] > 0, 0, total).astype(np.int32)
        for pool in range(pools):
            want = int(size[pool])
            if want <= 0:
                continue
            rows = np.flatnonzero((entries.victim >= 0) & (item == pool + 1))
            obj = entries.obj[rows]
            frees = objects.device[obj] & ~objects.host[obj] & (objects.class_of[obj] < 0)
            frees &= (objects.holders[obj] == 1) & ~objects.fixed_device[obj]
            amount = np.where(frees, objects.size[obj], 0)
            owner = entries.victim[rows]
            running = np.cumsum(amount)
            owner_total = np.bincount(owner, amount, minlength=v).astype(np.int64)
            before = np.cumsum(owner_total) - owner_total
            order = np.argsort(owner, kind="stable")
            running = np.cumsum(amount[order]) - before[owner[order]]
            after = owner_total[owner[order]] - running
            hit = (after < want) & (want <= after + amount[order])
            e = rows[order][hit]
            starts[owner[order][hit], pool] = entries.end[e] - (want - after[hit])
        out.append(starts)
    return out


def _sized_drop(
    v: int,
    m: int,
    pools: int,
    count: np.ndarray,
    reach: np.ndarray,
    want_pages: np.ndarray,
    want_states: int,
    entries: Entries,
    objects: Objects,
) -> np.ndarray:
    """Returns int32[V], how many deepest checkpoints must go to free the residual; capped at all but one."""
    drop = np.clip(np.full(v, want_states, np.int32), 1, np.maximum(count - 1, 1))
    item = objects.item[entries.obj]
    for pool in range(pools):
        if want_pages[pool] <= 0:
            continue
        rows = np.flatnonzero((entries.victim >= 0) & (item == pool + 1))
        obj = entries.obj[rows]
        owner = entries.victim[rows]
        frees = objects.device[obj] & (objects.class_of[obj] < 0) & (objects.holders[obj] == 1)
        amount = np.where(frees & ~objects.fixed_device[obj], objects.size[obj], 0)
        enough = np.zeros(v, bool)
        need = np.zeros(v, np.int32)
        for j in range(1, m):
            keep = np.maximum(count - j, 1)
            cover = reach[np.arange(v), keep, pool]
            freed = np.bincount(owner, amount * (entries.start[rows] >= cover[owner]), minlength=v)
            need = np.where(enough, need, j)
            enough |= freed >= want_pages[pool]
        drop = np.maximum(drop, need)
    return np.minimum(drop, np.maximum(count - 1, 1)).astype(np.int32)


def _bucket(size: int, buckets: tuple[int, ...]) -> int:
    for b in buckets:
        if size <= b:
            return b
    return -(-size // buckets[-1]) * buckets[-1]


def _make_tables(
    state: PhysicalState,
    victims: np.ndarray,
    counts: np.ndarray,
    options: OptionTable,
    entries: Entries,
    objects: Objects,
    needs: _Needs,
    used0: np.ndarray,
) -> tuple[Tables, np.ndarray]:
    """Returns the padded tables and bool[V, K], the options that mean something new for their owner."""
    pools = state.capacity.num_pools
    items = 1 + pools
    v, k, d = len(victims), len(options.templates), len(needs.needs)
    shared = np.flatnonzero(objects.class_of >= 0)
    c = len(shared)
    vp, kp = _bucket(v, VICTIM_BUCKETS), _bucket(k, OPTION_BUCKETS)
    cp, dp = _bucket(c, CLASS_BUCKETS), _bucket(d, CANDIDATE_BUCKETS)

    contributions = np.zeros((vp, kp, NUM_CONTRIBUTIONS * items + 2), np.int32)
    contributions[:v, :k, :-2] = lone_contributions(options, entries, objects, items)
    alive_count = np.bitwise_count(options.alive.astype(np.uint32)).astype(np.int32)
    contributions[:v, EVICT, -2] = 1
    contributions[:v, :k, -1] = counts[victims][:, None] - alive_count
    contributions[:, ABSENT] = 0
    device_mask, host_mask = class_masks(options, entries, objects, (vp, kp, cp), ABSENT)

    words = device_mask.shape[-1]
    effect = np.empty((v, k, contributions.shape[-1] + 2 * words + 1), np.int64)
    effect[..., : -2 * words - 1] = contributions[:v, :k]
    effect[..., -2 * words - 1 : -words - 1] = device_mask[:v, :k]
    effect[..., -words - 1 : -1] = host_mask[:v, :k]
    effect[..., -1] = options.alive
    digest = effect @ _odd_weights(effect.shape[-1])
    same = digest[:, :, None] == digest[:, None, :]
    same &= np.tri(k, k, -1, dtype=bool) & options.valid[:, None, :]
    same[:, ABSENT] = same[:, :, ABSENT] = False
    valid = options.valid & ~same.any(-1)

    units = np.zeros((cp, items), np.int32)
    units[np.arange(c), objects.item[shared]] = objects.size[shared]

    def padded(array: np.ndarray, shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
        out = np.full(shape, fill, array.dtype)
        out[tuple(slice(0, n) for n in array.shape)] = array
        return out

    tables = Tables(
        contributions,
        device_mask,
        host_mask,
        units,
        padded(objects.device[shared], (cp,)),
        padded(objects.host[shared], (cp,)),
        padded(objects.fixed_device[shared], (cp,)),
        padded(objects.fixed_host[shared], (cp,)),
        padded(needs.needs.reshape(d, -1), (dp, NUM_NEEDS * items)),
        padded(needs.need_class, (dp, cp)),
        padded(needs.hold_device, (dp, cp)),
        padded(needs.hold_host, (dp, cp)),
        padded(needs.late_class, (dp, cp)),
        padded(needs.tail_class, (dp, pools), NO_CLASS),
        padded(needs.image_class, (dp,), NO_CLASS),
        used0,
        state.capacity.units(),
        state.capacity.page_granules(),
        np.asarray([0, *(p.staging_pages for p in state.capacity.pools)], np.int32),
    )
    return tables, valid


def _odd_weights(n: int) -> np.ndarray:
    """Returns int64[n] odd multipliers without linear relations among small counts (splitmix64)."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
