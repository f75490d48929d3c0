"""The candidate half of the tables: what each candidate adds, restores and releases under pressure.

Owns: `Needs`. Objects that the source alone holds are summed here; shared classes become rows of bits,
because their fate depends on the victims too. Owns no victim.

Letters: D candidates, C classes, J items, N pools, F source objects of all candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from ninfer_jax.planner.candidate import Candidate
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, PhysicalCapacity
from ninfer_jax.planner.holders import Holdings, Objects
from ninfer_jax.planner.ids import NO_CLASS
from ninfer_jax.planner.sources import ImageRule, SourceView, TailRule

# column groups of `needs`, each J wide
H2D, H2D_OPS, TAIL_H2D, TAIL_D2D, FRESH, DEVICE_LATE, HOST_LATE, GROWTH, STATE_IS_FORK = range(9)
NUM_NEEDS: Final = 9


@dataclass(frozen=True, eq=False)
class Needs:
    """What the candidates ask for, unpadded; the fields of `tables.Tables` with the same names."""

    needs: np.ndarray  # int32[D, 9, J]
    need_class: np.ndarray  # bool[D, C]
    hold_device: np.ndarray  # bool[D, C]
    hold_host: np.ndarray  # bool[D, C]
    late_class: np.ndarray  # bool[D, C]
    tail_class: np.ndarray  # int32[D, N]
    image_class: np.ndarray  # int32[D]


@dataclass(frozen=True, eq=False)
class SourceObjects:
    """The objects of all sources in one row of arrays."""

    row: np.ndarray  # int64[F], candidate
    obj: np.ndarray  # int32[F]
    need: np.ndarray  # bool[F]
    hold_device: np.ndarray  # bool[F]
    hold_host: np.ndarray  # bool[F]
    late: np.ndarray  # bool[F], the source is consumed


def source_objects(sources: Sequence[SourceView]) -> SourceObjects:
    """Returns the sources' objects, joined."""
    lengths = [len(s.obj) for s in sources]
    return SourceObjects(
        np.repeat(np.arange(len(sources)), lengths),
        np.concatenate([s.obj for s in sources]),
        np.concatenate([s.need for s in sources]),
        np.concatenate([s.hold_device for s in sources]),
        np.concatenate([s.hold_host for s in sources]),
        np.repeat([s.consume for s in sources], lengths),
    )


def growth_pages(capacity: PhysicalCapacity, candidate: Candidate, base: np.ndarray | None) -> list[int]:
    """Returns the pages of each pool that are reserved beyond the reused ones (A-1).

    Args:
        base: int32[N], reused tokens of each pool; None for root.
    """
    page = capacity.page_tokens
    reused = [0] * capacity.num_pools if base is None else base.tolist()
    asked = candidate.request.capacity_tokens
    return [max(-(-t // page) + (-b // page), 0) for t, b in zip(asked, reused, strict=True)]


def make_needs(holdings: Holdings, candidates: Sequence[Candidate], sources: Sequence[SourceView]) -> Needs:
    """Returns the candidates' rows."""
    state, objects = holdings.state, holdings.objects
    pools, num_classes, d = state.capacity.num_pools, len(holdings.shared), len(candidates)
    items = 1 + pools
    needs = np.zeros((d, NUM_NEEDS, items), np.int32)
    tail_class, image_class = np.full((d, pools), NO_CLASS, np.int32), np.full(d, NO_CLASS, np.int32)
    for i, (candidate, view) in enumerate(zip(candidates, sources, strict=True)):
        root = candidate.checkpoint is None
        base = None if root else state.checkpoint_kv_tokens[candidate.checkpoint]
        needs[i, GROWTH, 1:] = growth_pages(state.capacity, candidate, base)
        needs[i, FRESH, 0] = root
        _copies(objects, view, needs[i], tail_class[i])
        if view.image_rule == ImageRule.BY_OTHERS:
            image_class[i] = objects.class_of[view.image_obj]

    f = source_objects(sources)
    item, size = objects.item[f.obj], objects.size[f.obj]
    device, host, classes = objects.device[f.obj], objects.host[f.obj], objects.class_of[f.obj]
    lone = classes < 0
    stays_device = f.hold_device | objects.fixed_device[f.obj] | f.need
    stays_host = (f.hold_host | objects.fixed_host[f.obj]) & (host | ~stays_device)
    restored = lone & f.need & ~device
    cell = f.row * items + item
    for group, picked, amount in (
        (H2D, restored, size),
        (H2D_OPS, restored, np.ones_like(size)),
        (DEVICE_LATE, lone & f.late & device & ~stays_device, size),
        (HOST_LATE, lone & f.late & host & ~stays_host, size),
    ):
        units = np.bincount(cell[picked], amount[picked], minlength=d * items)
        needs[:, group] = units.reshape(d, items)

    def bits(values: np.ndarray) -> np.ndarray:
        out = np.zeros((d, num_classes), bool)
        out[f.row[~lone], classes[~lone]] = values[~lone]
        return out

    return Needs(
        needs,
        bits(f.need),
        bits(f.hold_device),
        bits(f.hold_host),
        bits(f.late),
        tail_class,
        image_class,
    )


def _copies(objects: Objects, view: SourceView, row: np.ndarray, tail_class: np.ndarray) -> None:
    """Writes the copies of one candidate that are certain, and the classes that decide about the others."""
    for pool, (tail, rule) in enumerate(zip(view.tail_obj, view.tail_rule, strict=True)):
        if rule == TailRule.COPY:
            row[TAIL_D2D if objects.device[tail] else TAIL_H2D, pool + 1] += 1
        elif rule == TailRule.BY_OTHERS:
            tail_class[pool] = objects.class_of[tail]
    if view.image_rule == ImageRule.FORK:
        row[TAIL_D2D if objects.device[view.image_obj] else TAIL_H2D, 0] += 1
        row[STATE_IS_FORK, 0] = 1


def identity_deficits(holdings: Holdings, needs: Needs) -> np.ndarray:
    """Returns int32[D, R], about how many units each candidate's identity misses; sizes the options."""
    objects, shared = holdings.objects, holdings.shared
    columns = needs.needs
    device = columns[:, [H2D, TAIL_H2D, TAIL_D2D, FRESH, GROWTH]].sum(1) - columns[:, DEVICE_LATE]
    restored = needs.need_class & ~objects.device[shared]
    for item in range(columns.shape[2]):
        device[:, item] += (restored * (objects.size[shared] * (objects.item[shared] == item))).sum(1)
    missing = np.tile(holdings.used0, (len(columns), 1)) - holdings.state.capacity.units()
    missing[:, DEVICE_STATE] += device[:, 0]
    missing[:, DEVICE_PAGES:] += device[:, 1:]
    return np.maximum(missing, 0).astype(np.int32)
