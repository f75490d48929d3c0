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
from ninfer_jax.planner.holders import Holdings, Objects
from ninfer_jax.planner.ids import NO_OWNER, OwnerKind
from ninfer_jax.planner.lineage import surviving_checkpoints


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


def check_candidates(holdings: Holdings, candidates: Sequence[Candidate]) -> None:
    """Returns None if every candidate can be planned.

    Raises:
        ValueError: if a source is not a live inactive checkpoint, a consumed one is shared or protected, or a
            request asks for another number of pools than the state has.
    """
    state, pools = holdings.state, holdings.state.capacity.num_pools
    for i, candidate in enumerate(candidates):
        asked = len(candidate.request.capacity_tokens)
        if asked != pools:
            raise ValueError(f"candidate {i} asks for {asked} pools, the state has {pools}")
        source = candidate.checkpoint
        if source is None:
            continue
        inside = 0 <= source < len(state.checkpoint_owner)
        owner = int(state.checkpoint_owner[source]) if inside else NO_OWNER
        kind = OwnerKind.FREE if owner == NO_OWNER else int(state.owner_kind[owner])
        if kind not in (int(OwnerKind.PRIVATE), int(OwnerKind.SHARED)):
            raise ValueError(f"candidate {i}: checkpoint row {source} belongs to no inactive owner")
        is_bound = not holdings.may_go[owner] or kind == int(OwnerKind.SHARED)
        if candidate.disposition == Disposition.CONSUME and is_bound:
            raise ValueError(f"candidate {i}: owner {owner} is shared or protected and cannot be consumed")


def tail_rule(objects: Objects, obj: int, consume: bool) -> TailRule:
    """Returns what happens to the partial tail page `obj`."""
    # whether an owner outside the domain holds it too; a protected source itself counts as such
    if not consume or objects.fixed_device[obj] or objects.fixed_host[obj]:
        return TailRule.COPY
    return TailRule.BY_OTHERS if objects.class_of[obj] >= 0 else TailRule.IN_PLACE


def image_rule(holdings: Holdings, owner: int, image: int, *, stays: bool) -> ImageRule:
    """Returns how the sequence gets the state from `image`.

    Args:
        stays: whether a surviving checkpoint of the source refers to it.
    """
    objects = holdings.objects
    if stays or objects.fixed_device[image] or objects.fixed_host[image] or not holdings.may_go[owner]:
        return ImageRule.FORK
    return ImageRule.BY_OTHERS if objects.class_of[image] >= 0 else ImageRule.MOVE


def surviving_bits(holdings: Holdings, candidate: Candidate, owner: int) -> int:
    """Returns the source's checkpoints that stay, bit k for rank k; all of them if it is retained."""
    if candidate.disposition != Disposition.CONSUME:
        return -1
    assert candidate.checkpoint is not None
    rows = holdings.checkpoints_of(owner)
    stays = surviving_checkpoints(holdings.state, int(candidate.checkpoint), rows).tolist()
    return sum(1 << k for k, stay in enumerate(stays) if stay)


def _root_view(pools: int) -> SourceView:
    nothing = np.zeros(0, np.int32)
    none = np.zeros(0, bool)
    return SourceView(
        NO_OWNER, False, nothing, none, none, none, (-1,) * pools, (TailRule.NONE,) * pools, -1, ImageRule.NEW
    )


def source_view(holdings: Holdings, candidate: Candidate) -> SourceView:
    """Returns the view of one candidate's source; the candidate is checked already."""
    if candidate.checkpoint is None:
        return _root_view(holdings.state.capacity.num_pools)
    state, entries, objects = holdings.state, holdings.entries, holdings.objects
    source = int(candidate.checkpoint)
    owner = int(state.checkpoint_owner[source])
    consume = candidate.disposition == Disposition.CONSUME
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
            tails[pool], rules[pool] = obj, tail_rule(objects, obj, consume)
            need[e] = rules[pool] == TailRule.IN_PLACE

    images = entries.obj[image_rows]
    held = (entries.bits[image_rows] & surviving_bits(holdings, candidate, owner)) != 0
    image = int(state.checkpoint_image[source])
    chosen = images == image
    rule = image_rule(holdings, owner, image, stays=bool((held & chosen).any()))
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
