"""Where every checkpoint ends up in a target, and by which recipes it could be recovered (O-5).

Owns: the fates of checkpoints as arrays for many targets, and the recipe list of one checkpoint. Owns no
price and picks no recipe: `portfolio` takes the cheapest after `cost` priced them.

A checkpoint is recovered directly (Device copy, or restore of what is on Host), by prefill from a shallower
surviving checkpoint of the same owner, or by prefill from root.

Letters: B targets, Q checkpoints of the problem, V victims, K options, C classes, N pools, D classes that one
checkpoint needs at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ninfer_jax.planner.holders import checkpoint_ranks
from ninfer_jax.planner.ids import NO_OWNER, CheckpointId, OwnerId
from ninfer_jax.planner.lineage import surviving_checkpoints
from ninfer_jax.planner.options import ReplicaAction
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.projection import BATCH_BUCKETS, class_fates
from ninfer_jax.planner.search_types import CheckpointOutcomes
from ninfer_jax.planner.state import checkpoints_of
from ninfer_jax.planner.tables import Tables
from ninfer_jax.planner.target import ABSENT, KEEP, TargetBatch
from ninfer_jax.planner.work import (
    Direction,
    Phase,
    PrefillWork,
    TransferWork,
    Work,
    attention_pairs,
    coalesce,
)

Array = Any  # numpy.ndarray or jax.Array, depending on `xp`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class OutcomeTables:
    """Per-checkpoint tables; build once per problem with `make_outcome_tables`."""

    victim: np.ndarray  # int32[Q], victim row, or the padding row V (always KEEP) for other owners
    alive: np.ndarray  # bool[Q, K]
    image_class: np.ndarray  # int32[Q], class row or C (never on Host)
    image_device: np.ndarray  # bool[Q, K], for images that are no class
    host_pages: (
        np.ndarray
    )  # int32[Q, K, N + 1], Host-only pages per pool outside classes, then copy operations
    classes: np.ndarray  # int32[Q, D], classes that the checkpoint needs; padded with C
    class_pages: np.ndarray  # int32[C + 1, N + 1], pages per pool and one operation
    released: np.ndarray  # bool[candidates, Q], gone with the consumed source
    restored: np.ndarray  # int32[candidates, Q, N + 1], part of host_pages that the candidate restores


@dataclass(frozen=True)
class Recovery:
    """One way to get a checkpoint back: `work` after starting from `start` (None: root or itself)."""

    work: Work
    start: CheckpointId | None


def make_outcome_tables(problem: Problem) -> OutcomeTables:
    """Returns the tables of all live checkpoints, in `problem.checkpoints` order."""
    state, options, objects, entries = problem.state, problem.options, problem.objects, problem.entries
    rows = problem.checkpoints
    q, k, v, pools = len(rows), problem.num_options, problem.num_victims, state.capacity.num_pools
    num_classes = len(problem.tables.class_device)
    owner = state.checkpoint_owner[rows]
    victim_of = np.full(state.num_owners, v, np.int32)
    victim_of[problem.victims] = np.arange(v)
    victim = victim_of[owner]
    rank = checkpoint_ranks(state)[0][rows].astype(np.int64)
    alive_bits = np.concatenate([options.alive, np.full((1, k), -1, np.int32)])
    alive = (alive_bits[victim] >> rank[:, None] & 1).astype(bool)

    image = state.checkpoint_image[rows]
    image_class = np.where(objects.class_of[image] >= 0, objects.class_of[image], num_classes)
    demoted = options.state_action[None] == ReplicaAction.DEMOTE
    dropped = (options.state_action[None] == ReplicaAction.DROP_DEVICE) & objects.host[image][:, None]
    pair = owner.astype(np.int64) * len(objects.item) + image
    is_image = np.flatnonzero(entries.bits != 0)  # sorted by owner, then image
    pairs = entries.owner[is_image].astype(np.int64) * len(objects.item) + entries.obj[is_image]
    own_bits = entries.bits[is_image][np.searchsorted(pairs, pair)].astype(np.int64)
    state_bits = np.concatenate([options.state_bits, np.zeros((1, k), np.int32)])[victim]
    all_taken = (own_bits[:, None] & alive_bits[victim] & ~state_bits) == 0
    # an object that a fixed owner holds as well stays as it is, whatever one victim's option says
    lone = (objects.holders == 1) & ~(objects.fixed_device | objects.fixed_host) & (objects.class_of < 0)
    image_device = objects.device[image][:, None] & ~((demoted | dropped) & all_taken & lone[image][:, None])

    # runs: Host-only pages of every entry under every option, as prefix sums along each address space
    is_run = np.flatnonzero(objects.item[entries.obj] > 0)
    obj, pool = entries.obj[is_run], objects.item[entries.obj[is_run]] - 1
    host_only = np.where(objects.host[obj] & ~objects.device[obj], objects.size[obj], 0)
    amount = np.repeat(np.where(objects.class_of[obj] < 0, host_only, 0)[:, None], k, 1)
    ours = entries.victim[is_run]
    inside = np.flatnonzero((ours >= 0) & lone[obj])
    first = options.kv_from[ours[inside], :, pool[inside]]
    acted = np.clip(
        entries.end[is_run][inside, None] - np.maximum(entries.start[is_run][inside, None], first), 0, None
    )
    both = (objects.device & objects.host)[obj[inside], None]
    only = (objects.device & ~objects.host)[obj[inside], None]
    kv = options.kv_action[None]
    moves = ((kv == ReplicaAction.DEMOTE) & (only | both)) | ((kv == ReplicaAction.DROP_DEVICE) & both)
    amount[inside] += np.where(moves, acted, 0).astype(amount.dtype)
    pages = np.concatenate([np.zeros((1, k), np.int64), np.cumsum(amount, 0)])
    ops = np.concatenate([np.zeros((1, k), np.int64), np.cumsum(amount > 0, 0)])
    stride = np.int64(entries.end.max(initial=0) + 2)
    key = (entries.owner[is_run].astype(np.int64) * pools + pool) * stride + entries.start[is_run]
    order = np.argsort(key, kind="stable")
    assert (order == np.arange(len(order))).all(), "entries are sorted by owner, pool and start"
    host_pages = np.zeros((q, k, pools + 1), np.int32)
    need = -(-state.checkpoint_kv_tokens[rows] // state.capacity.page_tokens)
    in_class = np.flatnonzero(objects.class_of[obj] >= 0)
    blocks = []
    for n in range(pools):
        base = (owner.astype(np.int64) * pools + n) * stride
        lo, hi = np.searchsorted(key, base), np.searchsorted(key, base + need[:, n])
        host_pages[:, :, n] = pages[hi] - pages[lo]
        host_pages[:, :, pools] += (ops[hi] - ops[lo]).astype(np.int32)
        first, last = np.searchsorted(in_class, lo), np.searchsorted(in_class, hi)
        column = np.arange(int((last - first).max(initial=0)))
        at = np.minimum(first[:, None] + column, max(len(in_class) - 1, 0))
        inside = first[:, None] + column < last[:, None]
        found = objects.class_of[obj[in_class[at]]] if len(in_class) else np.zeros_like(at)
        blocks.append(np.where(inside, found, num_classes))
    classes = np.concatenate(blocks, 1).astype(np.int32)
    padding = -classes.shape[1] % 4 or (4 if not classes.shape[1] else 0)  # few shapes to compile
    classes = np.pad(classes, ((0, 0), (0, padding)), constant_values=num_classes)
    units = problem.tables.class_units[:, 1:]
    class_pages = np.zeros((num_classes + 1, pools + 1), np.int32)
    class_pages[:-1, :pools] = units
    class_pages[:-1, pools] = (units > 0).any(1)
    released = np.zeros((len(problem.tables.needs), q), bool)
    restored = np.zeros((len(problem.tables.needs), q, pools + 1), np.int32)
    for d, source in enumerate(problem.sources):
        checkpoint = problem.candidates[d].checkpoint
        if checkpoint is None:
            continue
        mine = checkpoints_of(state, OwnerId(source.owner))
        if source.consume:
            gone = mine[~surviving_checkpoints(state, checkpoint)]
            released[d, np.searchsorted(rows, gone)] = True
        back = source.need & ~objects.device[source.obj] & (objects.class_of[source.obj] < 0)
        for run in source.obj[back & (objects.item[source.obj] > 0)]:
            n = int(objects.item[run]) - 1
            for e in np.flatnonzero(obj == run):  # a protected owner may hold the same run
                holder, at = entries.owner[is_run][e], entries.start[is_run][e]
                covers = (owner == holder) & (need[:, n] > at)
                restored[d, covers, n] += objects.size[run]
                restored[d, covers, pools] += 1
    return OutcomeTables(
        victim.astype(np.int32),
        alive,
        image_class.astype(np.int32),
        image_device,
        host_pages,
        classes,
        class_pages,
        released,
        restored,
    )


def project_outcomes(
    xp: ModuleType, tables: Tables, outcome: OutcomeTables, candidate: Array, codes: Array
) -> tuple[Array, Array, Array]:
    """Returns alive, state on Device, and Host-only pages with copy operations, of every checkpoint.

    Args:
        candidate: int32[...].
        codes: int32[..., V], padded.
    Returns:
        bool[..., Q], bool[..., Q], int32[..., Q, N + 1] (pages of each pool, then operations).
    """
    on_device, on_host, *_ = class_fates(xp, tables, candidate, codes)
    keep = xp.zeros_like(codes[..., :1])
    code = xp.concatenate([xp.where(codes == ABSENT, KEEP, codes), keep], -1)
    # owners outside the domain point behind the last victim: at padding or at the appended KEEP
    k = code[..., outcome.victim]
    at = np.arange(outcome.victim.shape[0])
    alive = outcome.alive[at, k] & ~outcome.released[candidate]
    none = xp.zeros_like(on_device[..., :1])
    device = xp.concatenate([on_device, none], -1)
    host_only = xp.concatenate([on_host & ~on_device, none], -1)
    is_class = outcome.image_class < on_device.shape[-1]
    state_on_device = xp.where(is_class, device[..., outcome.image_class], outcome.image_device[at, k])
    shared = host_only[..., outcome.classes, None] * outcome.class_pages[outcome.classes]
    pages = outcome.host_pages[at, k] - outcome.restored[candidate] + shared.sum(-2).astype(xp.int32)
    return alive, state_on_device, pages


@jax.jit
def outcomes_batch(
    tables: Tables, outcome: OutcomeTables, candidate: Array, codes: Array
) -> tuple[Array, Array, Array]:
    """Returns `project_outcomes` of a batch, compiled."""
    tables, outcome = jax.tree.map(jnp.asarray, (tables, outcome))
    return jax.vmap(lambda c, t: project_outcomes(jnp, tables, outcome, c, t))(candidate, codes)


def checkpoint_outcomes(
    problem: Problem, outcome: OutcomeTables, targets: TargetBatch, *, compiled: bool = False
) -> CheckpointOutcomes:
    """Returns the checkpoints' fates in B targets; NumPy by default, compiled in batch buckets on request."""
    b, v = targets.codes.shape
    codes = np.zeros((b, problem.tables.contributions.shape[0]), np.int32)
    codes[:, :v] = targets.codes
    if not compiled:
        alive, device, pages = project_outcomes(np, problem.tables, outcome, targets.candidate, codes)
    else:
        parts = []
        for at in range(0, b, BATCH_BUCKETS[-1]):
            part = slice(at, min(at + BATCH_BUCKETS[-1], b))
            size = next(s for s in BATCH_BUCKETS if s >= part.stop - part.start)
            fill = size - (part.stop - part.start)
            which = np.concatenate([targets.candidate[part], np.zeros(fill, np.int32)])
            block = np.concatenate([codes[part], np.zeros((fill, codes.shape[1]), np.int32)])
            got = outcomes_batch(problem.tables, outcome, which, block)
            parts.append([np.asarray(x)[: size - fill] for x in got])
        alive, device, pages = (np.concatenate(x) for x in zip(*parts, strict=True))
    return CheckpointOutcomes(alive, device, pages[..., :-1], pages[..., -1])


def recoveries(
    problem: Problem, outcomes: CheckpointOutcomes, row: int, checkpoint: int
) -> tuple[Recovery, ...]:
    """Returns every recipe that recovers one checkpoint in target `row`; the last one is always from root.

    Args:
        checkpoint: checkpoint row of the state; must be one of `problem.checkpoints`.
    """
    state, rows = problem.state, problem.checkpoints
    capacity = state.capacity
    index = {int(c): i for i, c in enumerate(rows)}
    if checkpoint not in index:
        raise ValueError(f"checkpoint row {checkpoint} is not live in this problem")
    out: list[Recovery] = []
    a = index[checkpoint]
    if outcomes.alive[row, a]:
        sizes = capacity.item_bytes()
        tails = sum(
            sizes[n + 1]
            for n in range(capacity.num_pools)
            if state.checkpoint_kv_tokens[checkpoint, n] % capacity.page_tokens
        )
        num_tails = int(np.count_nonzero(state.checkpoint_kv_tokens[checkpoint] % capacity.page_tokens))
        pages = outcomes.h2d_pages[row, a]
        num_bytes = sum(int(p) * sizes[n + 1] for n, p in enumerate(pages))
        restore = not outcomes.state_on_device[row, a]
        h2d = TransferWork(
            Phase.CANDIDATE,
            Direction.H2D,
            int(outcomes.h2d_ops[row, a]) + restore,
            num_bytes + restore * sizes[0],
        )
        copies = num_tails + (not restore)
        d2d = TransferWork(Phase.CANDIDATE, Direction.D2D, copies, tails + (sizes[0] if not restore else 0))
        out.append(Recovery(Work(coalesce([h2d, d2d])), None))
    owner = OwnerId(int(state.checkpoint_owner[checkpoint]))
    if owner != NO_OWNER:
        for c in checkpoints_of(state, owner):
            if (
                state.checkpoint_frontier[c] < state.checkpoint_frontier[checkpoint]
                and outcomes.alive[row, index[int(c)]]
            ):
                out.append(
                    Recovery(
                        Work(prefill=interval_prefill(problem, int(c), checkpoint)), CheckpointId(int(c))
                    )
                )
    out.append(Recovery(Work(prefill=rebuild_work(problem, checkpoint)), None))
    return tuple(out)


def rebuild_work(problem: Problem, checkpoint: int) -> PrefillWork:
    """Returns the canonical prefill from root to the checkpoint's frontier (O-5)."""
    tokens = int(problem.state.checkpoint_frontier[checkpoint])
    chunks, items, patches = (int(x) for x in problem.state.checkpoint_rebuild[checkpoint])
    return PrefillWork(chunks, tokens, attention_pairs(0, tokens), items, patches)


def interval_prefill(problem: Problem, start: int, checkpoint: int) -> PrefillWork:
    """Returns the prefill from one checkpoint to a deeper one of the same history.

    The deeper rebuild contains the shallower one, so chunks and vision work are differences (C-7).
    """
    low, high = rebuild_work(problem, start), rebuild_work(problem, checkpoint)
    tokens = high.tokens - low.tokens
    return PrefillWork(
        max(high.chunks - low.chunks, 1 if tokens else 0),
        tokens,
        attention_pairs(low.tokens, tokens),
        max(high.vision_items - low.vision_items, 0),
        max(high.vision_patches - low.vision_patches, 0),
    )
