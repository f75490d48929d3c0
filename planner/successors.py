"""successors: every legal further degradation of a target, the helpful ones first (T-5, T-6).

Owns: monotone neighbourhoods of one owner, joint moves on objects that several victims hold, and the order
in which they are offered. The order is a hint and prunes nothing (G-1): what reclaims nothing alone comes
last, because it may complete a joint last-reference release.

Letters: V victims, K options, C classes, J items, R axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, HOST_KV, HOST_STATE
from ninfer_jax.planner.contributions import D2H, DEVICE_COPIED, DEVICE_NOW, HOST_NOW
from ninfer_jax.planner.options import ReplicaAction, Survivors, refines
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.projection import class_wants
from ninfer_jax.planner.target import ABSENT, EVICT, TargetBatch, make_targets

SCORE_ONE = 1 << 20  # full relief of one axis


@dataclass(frozen=True, eq=False)
class SuccessorTables:
    """What the enumeration needs of one problem; build once with `make_successor_tables`."""

    problem: Problem
    order: np.ndarray  # bool[V, K, K], `options.refines`
    relief: np.ndarray  # int32[V, K, R], units each option gives back by itself on each axis
    slack: np.ndarray  # int32[R], free units in the start state
    demote_all: int  # code that keeps all checkpoints and demotes everything


def make_successor_tables(problem: Problem) -> SuccessorTables:
    """Returns the partial order and the single-owner relief of every option."""
    v, k = problem.num_victims, problem.num_options
    items = problem.tables.class_units.shape[1]
    columns = problem.tables.contributions[:v, :k]

    def group(index: int) -> np.ndarray:
        return columns[..., index * items : (index + 1) * items]

    device = group(DEVICE_NOW) + group(DEVICE_COPIED)
    host = group(HOST_NOW) - group(D2H)
    relief = np.zeros((v, k, problem.tables.used0.shape[0]), np.int32)
    relief[..., DEVICE_STATE] = device[..., 0]
    relief[..., DEVICE_PAGES:] = device[..., 1:]
    relief[..., HOST_STATE] = host[..., 0]
    relief[..., HOST_KV] = (host[..., 1:] * problem.tables.granules).sum(-1)
    rule = (Survivors.ALL, ReplicaAction.DEMOTE, ReplicaAction.DEMOTE, 0, 0)
    demote_all = next(
        (
            code
            for code, t in enumerate(problem.options.templates)
            if (t.survivors, t.state, t.kv, t.state_extent, t.kv_extent) == rule
        ),
        EVICT,
    )
    slack = problem.tables.capacity - problem.tables.used0
    return SuccessorTables(problem, refines(problem.options), relief, slack, demote_all)


def successors(
    tables: SuccessorTables,
    target: TargetBatch,
    *,
    residual: np.ndarray,
    limit: int | None = None,
    licensed: np.ndarray | None = None,
) -> TargetBatch:
    """Returns the further degradations of one target, most relief first, ties by victim and code.

    Args:
        target: a batch of one.
        residual: int32[R], units missing; only orders the answer.
        limit: at most this many; None means all.
        licensed: bool[V], owners that may be evicted whole (G-7); None licenses all.
    """
    if len(target) != 1:
        raise ValueError(f"successors takes one target, got {len(target)}")
    problem, codes = tables.problem, target.codes[0]
    v = problem.num_victims
    may_evict = np.ones(v, bool) if licensed is None else licensed
    at = np.arange(v)
    allowed = tables.order[at, codes].copy()  # bool[V, K]
    allowed[codes == ABSENT] = False
    allowed[~may_evict, EVICT] = False
    rows, nexts = np.nonzero(allowed)
    gain = tables.relief[rows, nexts] - tables.relief[rows, codes[rows]]
    scores = _score(gain, residual, tables.slack)
    batch = np.repeat(codes[None], len(rows), 0)
    batch[np.arange(len(rows)), rows] = nexts

    joint, joint_scores = _joint_moves(tables, codes, residual, may_evict)
    batch = np.concatenate([batch, joint])
    scores = np.concatenate([scores, joint_scores])
    order = np.argsort(-scores, kind="stable")
    if limit is not None:
        order = order[:limit]
    return make_targets(int(target.candidate[0]), batch[order])


def _score(gain: np.ndarray, residual: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """Returns int64[...], relief of the missing axes, each up to SCORE_ONE; a new shortage costs as much."""
    gain = gain.astype(np.int64)
    short = residual > 0
    share = np.clip(gain, -residual, residual) * SCORE_ONE
    relief = np.where(short, share // np.maximum(residual, 1), 0).sum(-1)
    return relief - SCORE_ONE * (~short & (-gain > slack)).sum(-1)


def _joint_moves(
    tables: SuccessorTables, codes: np.ndarray, residual: np.ndarray, may_evict: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32[M, V] codes and int64[M] scores: all holders of one class demoted, or evicted, together.

    A class that two owners hold is freed by neither alone; without these moves a search guided by relief
    would have to walk through targets that look useless (T-6).
    """
    problem, v = tables.problem, tables.problem.num_victims
    objects = problem.objects
    shared = np.flatnonzero(objects.class_of >= 0)
    if not len(shared) or not v:
        return np.zeros((0, v), np.int32), np.zeros(0, np.int64)
    arrays = problem.tables
    at = np.arange(v)
    words = (arrays.device_mask[at, codes] | arrays.host_mask[at, codes]).astype("<u4", copy=False)
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    holds = bits[:, : len(shared)].T.astype(bool)  # [C, V]
    padded = np.zeros(arrays.contributions.shape[0], np.int32)
    padded[:v] = codes
    wanted, _ = class_wants(np, arrays, padded)
    may_move = wanted[: len(shared)] & ~objects.fixed_device[shared] & (holds.sum(1) > 1)
    item, size, host = objects.item[shared], objects.size[shared].astype(np.int64), objects.host[shared]
    pages = np.where(item > 0, arrays.granules[np.maximum(item - 1, 0)] * size, 1)
    kinds = (tables.demote_all, EVICT)
    able = np.zeros((len(shared), len(kinds)), bool)
    gains = np.zeros((len(shared), len(kinds), tables.relief.shape[2]), np.int64)
    c = np.arange(len(shared))
    for j, code in enumerate(kinds):
        can = tables.order[at, codes, code]
        if code == EVICT:
            can = can & may_evict
        able[:, j] = may_move & ~(holds & ~can).any(1)
        alone = (tables.relief[:, code] - tables.relief[at, codes]).astype(np.int64)
        gains[:, j] = holds.astype(np.int64) @ alone
        gains[c, j, np.where(item == 0, DEVICE_STATE, DEVICE_PAGES + item - 1)] += size
        if code != EVICT:
            gains[c, j, np.where(item == 0, HOST_STATE, HOST_KV)] -= np.where(host, 0, pages)
    which, j = np.nonzero(able)
    moves = np.where(holds[which], np.asarray(kinds, np.int32)[j][:, None], codes)
    first = {move.tobytes(): i for i, move in reversed(list(enumerate(moves)))}  # classes of the same holders
    rows = sorted(first.values())
    return moves[rows].astype(np.int32), _score(gains[which, j][rows], residual, tables.slack)
