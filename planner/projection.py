"""project: what a batch of targets does to occupancy, stage by stage (T-3, T-7, R-8, R-9).

Owns: the joint post-state as arithmetic on the tables: Move or Fork, in place or copy, releases, restores,
stage peaks. One function for numpy and jax.numpy; int32 and bits only, so every batch size, jit or not, gives
the same bits. Owns no state, no geometry (`resolution` has the exact recipe) and no price.

Letters: B targets, V victims, C classes, J items, N pools, R axes, W words, S stages.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ninfer_jax.planner.contributions import D2H, D2H_OPS, DEVICE_COPIED, DEVICE_NOW, HOST_NOW
from ninfer_jax.planner.identity import assess_identities
from ninfer_jax.planner.needs import (
    DEVICE_LATE,
    FRESH,
    GROWTH,
    H2D,
    H2D_OPS,
    HOST_LATE,
    STATE_IS_FORK,
    TAIL_D2D,
    TAIL_H2D,
)
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.stages import NUM_STAGES, Changes, stage_peaks, stage_used
from ninfer_jax.planner.tables import Tables
from ninfer_jax.planner.target import ABSENT, KEEP, TargetBatch

BATCH_BUCKETS: Final = (1, 32, 256, 1024)
NUMPY_BLOCK: Final = 256

Array = Any  # numpy.ndarray or jax.Array, depending on `xp`


def class_wants(xp: ModuleType, tables: Tables, codes: Array) -> tuple[Array, Array]:
    """Returns bool[..., C] twice: does any holder outside the source need the class on Device, on Host.

    Args:
        codes: int32[..., V].
    """
    c = tables.class_device.shape[0]
    words = _or_rows(xp, xp.concatenate([tables.device_mask, tables.host_mask], -1), codes)
    bits = _unpack_bits(xp, words)
    return bits[..., :c] | tables.fixed_device, bits[..., c:] | tables.fixed_host


def class_fates(
    xp: ModuleType, tables: Tables, candidate: Array, codes: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns the joint end of every class: on Device, on Host, needed by the sequence, tail copied, forked.

    Args:
        candidate: int32[...].
        codes: int32[..., V].
    Returns:
        bool[..., C], bool[..., C], bool[..., C], bool[..., N] (the tail page of the pool is such a class and
        is copied), bool[...] (the source image is such a class and is forked).
    """
    return fates_of(xp, tables, candidate, *class_wants(xp, tables, codes))


def fates_of(
    xp: ModuleType, tables: Tables, candidate: Array, other_device: Array, other_host: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns what `class_fates` returns, from what the holders outside the source want (bool[..., C])."""
    others = xp.logical_or(other_device, other_host)
    c = np.arange(tables.class_device.shape[0], dtype=np.int32)
    tail, image = tables.tail_class[candidate], tables.image_class[candidate][..., None]
    at = xp.concatenate([tail, image], -1)
    kept = xp.take_along_axis(others, xp.maximum(at, 0), -1) & (at >= 0)
    taken = (tables.tail_class[..., None] == c).any(-2) | (tables.image_class[..., None] == c)  # bool[D, C]
    need = tables.need_class[candidate] | (taken[candidate] & ~others)
    on_device = other_device | tables.hold_device[candidate] | need
    # nobody gains a second replica: a Host copy is made only when the Device replica goes
    on_host = (other_host | tables.hold_host[candidate]) & (tables.class_host | ~on_device)
    return on_device, on_host, need, kept[..., :-1], kept[..., -1]


def project(xp: ModuleType, tables: Tables, candidate: Array, codes: Array) -> Array:
    """Returns int32[..., X], the packed assessment of targets; `unpack` names the columns.

    Args:
        candidate: int32[...], index of the candidate.
        codes: int32[..., V], padded with KEEP.
    """
    summed = _sum_rows(xp, tables.contributions, codes)
    degraded = ((codes != KEEP) & (codes != ABSENT)).sum(-1, keepdims=True)
    return finish(xp, tables, candidate, summed, degraded, class_fates(xp, tables, candidate, codes))


def finish(
    xp: ModuleType,
    tables: Tables,
    candidate: Array,
    summed: Array,
    degraded: Array,
    fates: tuple[Array, Array, Array, Array, Array],
) -> Array:
    """Returns `project` from the sums over victims and the ends of the classes.

    Args:
        summed: int32[..., P], the options' contributions.
        degraded: int32[..., 1], owners under pressure.
        fates: from `class_fates`.
    """
    items = tables.class_units.shape[1]
    group = _groups(xp, summed[..., :-2], items)
    needs = _groups(xp, tables.needs, items)[:, candidate]
    on_device, on_host, need, copied, forked = fates
    late = tables.late_class[candidate]
    now_device, now_host = tables.class_device, tables.class_host
    d2h = on_host & ~now_host
    h2d = need & ~now_device
    device_freed, host_freed = now_device & ~on_device, now_host & ~on_host
    picked = xp.stack(
        [
            device_freed & ~d2h & ~late,
            device_freed & d2h & ~late,
            device_freed & late,
            host_freed & ~late,
            host_freed & late,
            d2h,
            h2d,
        ],
        -2,
    )
    weights = xp.concatenate([tables.class_units, (tables.class_units > 0).astype(xp.int32)], -1)
    sums = xp.moveaxis(_weighted_sums(xp, picked, weights), -2, 0)
    units, ops = _contiguous(xp, sums[..., :items]), sums[..., items:]

    # one unit of an item each: the state image, the tail page of every pool
    own_copy = xp.concatenate([forked[..., None], copied], -1)
    at = xp.concatenate([tables.image_class[candidate][..., None], tables.tail_class[candidate]], -1)
    on_device_now = now_device[xp.maximum(at, 0)]
    d2d = needs[TAIL_D2D] + (own_copy & on_device_now)
    tail_h2d = needs[TAIL_H2D] + (own_copy & ~on_device_now)
    restored = needs[H2D] + units[6]
    changes = Changes(
        device_now=group[DEVICE_NOW] + units[0],
        device_copied=group[DEVICE_COPIED] + units[1],
        device_late=needs[DEVICE_LATE] + units[2],
        host_now=group[HOST_NOW] + units[3],
        host_late=needs[HOST_LATE] + units[4],
        d2h=group[D2H] + units[5],
        h2d=restored,
        fresh=d2d + tail_h2d + needs[FRESH],
        growth=needs[GROWTH],
        staging=tables.staging,
    )
    used = stage_used(xp, tables.used0, changes, tables.granules)
    peak = stage_peaks(xp, used)
    is_fork = (needs[STATE_IS_FORK][..., :1] > 0) | forked[..., None]
    flat = used.reshape((*used.shape[:-2], used.shape[-2] * used.shape[-1]))
    parts = [
        flat,
        peak,
        xp.maximum(peak - tables.capacity, 0),
        changes.d2h,
        group[D2H_OPS] + ops[5],
        restored + tail_h2d,
        needs[H2D_OPS] + ops[6] + tail_h2d,
        d2d,
        is_fork,
        summed[..., -2:],
        degraded,
    ]
    return xp.concatenate([p.astype(xp.int32) for p in parts], -1)


def unpack(packed: np.ndarray, num_axes: int, num_items: int) -> Assessment:
    """Returns the packed columns under their names; int32[B, X] -> Assessment."""
    sizes = [(NUM_STAGES + 1) * num_axes, num_axes, num_axes, *[num_items] * 5, 1, 1, 1, 1]
    cuts = np.cumsum(sizes)[:-1]
    used, peak, residual, d2h, d2h_ops, h2d, h2d_ops, d2d, fork, evictions, drops, degraded = np.split(
        packed, cuts, axis=-1
    )
    return Assessment(
        used=used.reshape(len(packed), NUM_STAGES + 1, num_axes),
        peak=peak,
        residual=residual,
        fits=np.asarray((residual == 0).all(-1)),
        d2h=d2h,
        d2h_ops=d2h_ops,
        h2d=h2d,
        h2d_ops=h2d_ops,
        d2d=d2d,
        is_fork=fork[:, 0] > 0,
        evictions=evictions[:, 0],
        drops=drops[:, 0],
        degraded=degraded[:, 0],
    )


@jax.jit
def project_batch(tables: Tables, candidate: Array, codes: Array) -> jax.Array:
    """Returns `project` vmapped over a batch and compiled; one trace per bucket of shapes."""
    tables = jax.tree.map(jnp.asarray, tables)  # without jit they may still be NumPy arrays
    return jax.vmap(partial(project, jnp, tables))(candidate, codes)


def assess_numpy(problem: Problem, targets: TargetBatch) -> Assessment:
    """Returns the assessment computed by NumPy, in blocks that fit the cache; the compiled one's oracle.

    Identities are answered without the tables, so that a round without pressure never makes them (G-2).
    """
    if are_identities(problem, targets):
        changes = [problem.identity_changes[d] for d in targets.candidate.tolist()]
        return assess_identities(problem.holdings, changes)
    codes = padded_codes(problem, targets)
    blocks = [slice(at, at + NUMPY_BLOCK) for at in range(0, max(len(codes), 1), NUMPY_BLOCK)]
    parts = [project(np, problem.tables, targets.candidate[b], codes[b]) for b in blocks]
    packed = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return unpack(packed, problem.tables.used0.shape[0], problem.tables.class_units.shape[1])


def are_identities(problem: Problem, targets: TargetBatch) -> bool:
    """Returns whether there are targets and every one is the identity of its candidate."""
    if not len(targets) or targets.codes.shape[1] != problem.num_victims or (targets.codes > ABSENT).any():
        return False
    rows, victims = np.nonzero(targets.codes)
    expected = problem.source_victim[targets.candidate]
    has_source = np.flatnonzero(expected >= 0)
    return np.array_equal(rows, has_source) and np.array_equal(victims, expected[has_source])


def assess(problem: Problem, targets: TargetBatch, tables: Tables | None = None) -> Assessment:
    """Returns the assessment of B targets by the compiled projection, any B.

    Args:
        tables: the problem's tables already committed to the CPU device by the caller; None uses the NumPy
            ones, which JAX uploads to its default device.
    """
    tables = problem.tables if tables is None else tables
    codes = padded_codes(problem, targets)
    total, chunks, at = len(targets), [], 0
    while at < total or not chunks:
        size = next((b for b in BATCH_BUCKETS if b >= total - at), BATCH_BUCKETS[-1])
        part = slice(at, min(at + size, total))
        fill = size - (part.stop - part.start)
        which = np.concatenate([targets.candidate[part], np.zeros(fill, np.int32)])
        block = np.concatenate([codes[part], np.zeros((fill, codes.shape[1]), np.int32)])
        chunks.append(np.asarray(project_batch(tables, which, block))[: size - fill])
        at = part.stop
        if total == 0:
            break
    packed = np.concatenate(chunks) if len(chunks) > 1 else chunks[0]
    return unpack(packed, problem.tables.used0.shape[0], problem.tables.class_units.shape[1])


def padded_codes(problem: Problem, targets: TargetBatch) -> np.ndarray:
    """Returns the codes padded to the tables' victims; pads are KEEP on rows that hold nothing."""
    if targets.codes.shape[1] != problem.num_victims:
        raise ValueError(
            f"targets have {targets.codes.shape[1]} victims, this problem has {problem.num_victims}: "
            "targets live only within one problem"
        )
    padded = np.zeros((len(targets), problem.tables.contributions.shape[0]), np.int32)
    padded[:, : problem.num_victims] = targets.codes
    return padded


def _rows(xp: ModuleType, table: Array, codes: Array) -> Array:
    """Returns ``table[v, codes[..., v]]``, NumPy with victims first, JAX with victims next to last.

    Each library reduces its own layout fastest, and no code is out of bounds, which JAX would check.
    """
    v, k = table.shape[:2]
    flat = table.reshape(v * k, -1)
    at = codes + np.arange(0, v * k, k, dtype=np.int32)
    if xp is np:
        return flat.take(np.moveaxis(at, -1, 0), axis=0)
    return jnp.asarray(flat).at[at].get(mode="promise_in_bounds")


def _sum_rows(xp: ModuleType, table: Array, codes: Array) -> Array:
    """Returns the sum over victims of their options' rows: int32[V, K, P] -> int32[..., P]."""
    rows = _rows(xp, table, codes)
    return np.add.reduce(rows, axis=0, dtype=np.int32) if xp is np else rows.sum(-2, dtype=jnp.int32)


def _or_rows(xp: ModuleType, table: Array, codes: Array) -> Array:
    """Returns the bitwise OR over victims of their options' words: uint32[V, K, W] -> uint32[..., W]."""
    rows = _rows(xp, table, codes)
    if xp is np:
        return np.bitwise_or.reduce(rows, axis=0)
    return lax.reduce(rows, np.uint32(0), lax.bitwise_or, (rows.ndim - 2,))


def _unpack_bits(xp: ModuleType, words: Array) -> Array:
    """Returns bool[..., 32 * W], bit b of word w at 32 * w + b."""
    if xp is np:
        octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
        return np.unpackbits(octets, axis=-1, bitorder="little").view(bool)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.reshape((*words.shape[:-1], 32 * words.shape[-1])) != 0


def _groups(xp: ModuleType, columns: Array, items: int) -> Array:
    """Returns int32[G, ..., J] from int32[..., G * J], each group contiguous: NumPy adds those faster."""
    split = columns.reshape((*columns.shape[:-1], columns.shape[-1] // items, items))
    return _contiguous(xp, xp.moveaxis(split, -2, 0))


def _contiguous(xp: ModuleType, a: Array) -> Array:
    return np.ascontiguousarray(a) if xp is np else a


def _weighted_sums(xp: ModuleType, picked: Array, weights: Array) -> Array:
    """Returns int32[..., G, M] sums of the weights of what is picked; integers, exact in any order.

    NumPy has no fast integer product; floats hold every whole number below 2**24, or 2**53, exactly.

    Args:
        picked: bool[..., G, C].
        weights: int32[C, M].
    """
    if xp is np:
        exact = np.float32 if weights.sum(0, dtype=np.int64).max(initial=0) < 2**24 else np.float64
        flat = picked.reshape(-1, picked.shape[-1]).astype(exact)
        sums = np.matmul(flat, weights.astype(exact)).astype(np.int32)
        return sums.reshape((*picked.shape[:-1], weights.shape[-1]))
    return xp.matmul(picked.astype(xp.int32), weights)


def num_columns(num_axes: int, num_items: int) -> int:
    """Returns X, the packed width."""
    return (NUM_STAGES + 3) * num_axes + 5 * num_items + 4
