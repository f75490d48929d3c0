"""What each candidate's source keeps, hands over and leaves to others (R-9, S-3, N-9).

Owns: `SourceView` and the two rules that say how the sequence gets its state image and its partial tail page.
Cost follows the source owner's own objects. Owns no sum and no other owner's fate.

A candidate's source is no victim of that candidate. A consumed source stays whole until the commit: what it
loses is freed in the last stage (X-9).

Letters: M objects of one source, N pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from ninfer_jax.planner.candidate import Candidate, Disposition
from ninfer_jax.planner.holders import Holdings
from ninfer_jax.planner.ids import NO_OWNER, OwnerKind
from ninfer_jax.planner.lineage import surviving_checkpoints
from ninfer_jax.planner.options import MAX_CHECKPOINTS


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


def make_sources(holdings: Holdings, candidates: Sequence[Candidate]) -> tuple[SourceView, ...]:
    """Returns the view of every candidate's source.

    Raises:
        ValueError: if a source is not a live inactive checkpoint, a consumed one is shared or protected, or a
            request asks for another number of pools than the state has.
    """
    pools = holdings.state.capacity.num_pools
    views = []
    for i, candidate in enumerate(candidates):
        asked = len(candidate.request.capacity_tokens)
        if asked != pools:
            raise ValueError(f"candidate {i} asks for {asked} pools, the state has {pools}")
        is_root = candidate.checkpoint is None
        views.append(_root_view(pools) if is_root else _source_view(holdings, i, candidate))
    return tuple(views)


def _root_view(pools: int) -> SourceView:
    nothing = np.zeros(0, np.int32)
    none = np.zeros(0, bool)
    return SourceView(
        NO_OWNER, False, nothing, none, none, none, (-1,) * pools, (TailRule.NONE,) * pools, -1, ImageRule.NEW
    )


def _source_view(holdings: Holdings, i: int, candidate: Candidate) -> SourceView:
    assert candidate.checkpoint is not None
    state, entries, objects = holdings.state, holdings.entries, holdings.objects
    source = int(candidate.checkpoint)
    owner = int(state.checkpoint_owner[source]) if 0 <= source < len(state.checkpoint_owner) else NO_OWNER
    if owner == NO_OWNER or state.owner_kind[owner] not in (OwnerKind.PRIVATE, OwnerKind.SHARED):
        raise ValueError(f"candidate {i}: checkpoint row {source} belongs to no inactive owner")
    consume = candidate.disposition == Disposition.CONSUME
    if consume and (not holdings.may_go[owner] or state.owner_kind[owner] == OwnerKind.SHARED):
        raise ValueError(f"candidate {i}: owner {owner} is shared or protected and cannot be consumed")

    image_rows, run_rows = holdings.entries_of(owner)
    runs, end = entries.obj[run_rows], entries.end[run_rows]
    base = state.checkpoint_kv_tokens[source]
    full = base // state.capacity.page_tokens  # whole pages that the sequence reuses, per pool
    pool_of = objects.item[runs] - 1
    need = end <= full[pool_of]
    partial = base % state.capacity.page_tokens > 0
    tails, rules = [-1] * len(full), [TailRule.NONE] * len(full)
    if partial.any():
        for e in np.flatnonzero(partial[pool_of] & (entries.start[run_rows] == full[pool_of])).tolist():
            obj, pool = int(runs[e]), int(pool_of[e])
            tails[pool], rules[pool] = obj, _tail_rule(holdings, obj, consume)
            need[e] = rules[pool] == TailRule.IN_PLACE

    images = entries.obj[image_rows]
    held = np.ones(len(images), bool)
    if consume:
        stays = surviving_checkpoints(state, source)
        alive = sum(1 << k for k in range(min(len(stays), MAX_CHECKPOINTS + 1)) if stays[k])
        held = (entries.bits[image_rows] & np.int64(alive)) != 0
    image = int(state.checkpoint_image[source])
    chosen = images == image
    fixed = objects.fixed_device[image] or objects.fixed_host[image]
    if fixed or not holdings.may_go[owner] or (held & chosen).any():
        rule = ImageRule.FORK
    elif objects.class_of[image] >= 0:
        rule = ImageRule.BY_OTHERS
    else:
        rule = ImageRule.MOVE
    moves = chosen & (rule == ImageRule.MOVE)
    kept = np.full(len(runs), not consume)
    obj = np.concatenate([runs, images])
    return SourceView(
        owner,
        consume,
        obj,
        np.concatenate([need, moves]),
        np.concatenate([kept, held | (chosen & ~moves)]) & objects.device[obj],
        np.concatenate([kept, held]) & objects.host[obj],
        tuple(tails),
        tuple(rules),
        image,
        rule,
    )


def _tail_rule(holdings: Holdings, obj: int, consume: bool) -> TailRule:
    objects = holdings.objects
    # whether an owner outside the domain holds it too; a protected source itself counts as such
    if not consume or objects.fixed_device[obj] or objects.fixed_host[obj]:
        return TailRule.COPY
    return TailRule.BY_OTHERS if objects.class_of[obj] >= 0 else TailRule.IN_PLACE
