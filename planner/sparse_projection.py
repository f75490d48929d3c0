"""The projection of a batch of neighbours: the reference once, then what each target changes.

Owns: the NumPy way that a search uses; the same bits as `projection.project`. Everything that adds over
victims is tabled per option in its final form, stage by stage; what depends on shared classes and on the
candidate is projected once for each distinct combination of them.

Letters: B targets, V victims, K options, J items, R axes, S stages, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE
from ninfer_jax.planner.cells import Cells, are_scattered, make_cells, sum_by_target
from ninfer_jax.planner.class_patterns import ClassPatterns, class_patterns
from ninfer_jax.planner.contributions import (
    D2H,
    D2H_OPS,
    DEVICE_COPIED,
    DEVICE_NOW,
    HOST_NOW,
    NUM_CONTRIBUTIONS,
)
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.projection import assess_numpy, fates_of, finish, unpack
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.stages import NUM_STAGES, Changes, stage_used
from ninfer_jax.planner.target import ABSENT, TargetBatch

# rows of the occupancy between COPY_PREPARATION and COPY_PUBLICATION, while packed pages are staged
STAGED_ROWS: Final = slice(2, 4)


@dataclass(frozen=True, eq=False)
class SparseTables:
    """`Tables` in the form that is summed. Build with `make_sparse_tables`."""

    problem: Problem
    effect: np.ndarray  # int32[V, K, E]: occupancy by stage, copies and their operations, evictions, drops, 1


def make_sparse_tables(problem: Problem) -> SparseTables:
    """Returns the tables of one problem."""
    tables = problem.tables
    v, k, items = problem.num_victims, problem.num_options, tables.class_units.shape[1]
    columns = tables.contributions[:v, :k]
    group = np.moveaxis(columns[..., :-2].reshape(v, k, NUM_CONTRIBUTIONS, items), 2, 0)
    zero = np.zeros_like(group[0])
    changes = Changes(
        device_now=group[DEVICE_NOW],
        device_copied=group[DEVICE_COPIED],
        device_late=zero,
        host_now=group[HOST_NOW],
        host_late=zero,
        d2h=group[D2H],
        h2d=zero,
        fresh=zero,
        growth=zero,
        staging=np.zeros_like(tables.staging),
    )
    used = stage_used(np, np.zeros_like(tables.used0), changes, tables.granules)
    degraded = np.broadcast_to((np.arange(k) > ABSENT)[:, None], (v, k, 1))
    parts = [
        used.reshape(v, k, (NUM_STAGES + 1) * len(tables.used0)),
        group[D2H],
        group[D2H_OPS],
        columns[..., -2:],
        degraded,
    ]
    effect = np.concatenate([p.astype(np.int32) for p in parts], -1)
    return SparseTables(problem, effect)


def assess_sparse(sparse: SparseTables, targets: TargetBatch) -> Assessment:
    """Returns the assessment of a batch; the bits of `projection.assess`."""
    tables = sparse.problem.tables
    axes, items = len(tables.used0), tables.class_units.shape[1]
    if targets.codes.shape[1] != sparse.problem.num_victims or not len(targets):
        raise ValueError(
            f"got {len(targets)} targets with {targets.codes.shape[1]} victims, expected at least one with "
            f"{sparse.problem.num_victims}: targets live only within one problem"
        )
    if are_scattered(targets.codes):
        return assess_numpy(sparse.problem, targets)
    cells = make_cells(targets.codes)
    patterns = class_patterns(sparse.problem.class_tables, targets.candidate, targets.codes, cells)
    own = _sum_effects(sparse, cells)
    shared = _project_patterns(sparse, patterns)
    rest = (NUM_STAGES + 3) * axes
    packed = shared[patterns.group]
    flat = (NUM_STAGES + 1) * axes
    packed[:, :flat] += own[:, :flat]
    packed[:, rest : rest + 2 * items] += own[:, flat : flat + 2 * items]
    packed[:, -3:] += own[:, -3:]
    used = packed[:, :flat].reshape(len(packed), NUM_STAGES + 1, axes)
    if tables.staging.any():
        staged = np.minimum(packed[:, rest : rest + items], tables.staging)
        used[:, STAGED_ROWS, DEVICE_STATE] += staged[:, :1]
        used[:, STAGED_ROWS, DEVICE_PAGES:] += staged[:, None, 1:]
    peak = used.max(1)
    packed[:, flat : flat + axes] = peak
    np.maximum(peak - tables.capacity, 0, out=packed[:, flat + axes : rest])
    return unpack(packed, axes, items)


def _sum_effects(sparse: SparseTables, cells: Cells) -> np.ndarray:
    """Returns int32[B, E], summed over victims."""
    effect = sparse.effect
    v, k, width = effect.shape
    flat = effect.reshape(v * k, width)
    before = cells.owners * k + cells.reference[cells.owners]
    change = flat.take(cells.owners * k + cells.codes, 0)
    change -= flat.take(before, 0)
    reference = effect[np.arange(v), cells.reference].sum(0, dtype=np.int32)
    return sum_by_target(cells, change) + reference


def _project_patterns(sparse: SparseTables, patterns: ClassPatterns) -> np.ndarray:
    """Returns int32[G, X], the packed projection in which no victim contributes anything of its own."""
    tables = sparse.problem.tables
    unstaged = replace(tables, staging=np.zeros_like(tables.staging))
    nothing = np.zeros((len(patterns.candidate), tables.contributions.shape[-1]), np.int32)
    fates = fates_of(np, tables, patterns.candidate, patterns.on_device, patterns.on_host)
    return finish(np, unstaged, patterns.candidate, nothing, nothing[:, :1], fates)
