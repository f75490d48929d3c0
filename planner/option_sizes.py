"""Option parameters of every victim, sized to what the candidates miss (T-5).

Owns: how much of an owner a sized option takes. Reads placements of the start state; what an option does to
them is in `contributions`.

Letters: V victims, K options, M checkpoints of one owner at most, N pools, D candidates, R axes.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE
from ninfer_jax.planner.holders import Entries, Holdings, Objects
from ninfer_jax.planner.options import (
    MAX_CHECKPOINTS,
    OptionTable,
    Survivors,
    Template,
    survivors_of,
    template_columns,
)
from ninfer_jax.planner.target import ABSENT


def make_options(holdings: Holdings, templates: tuple[Template, ...], deficits: np.ndarray) -> OptionTable:
    """Returns the parameters of all victims.

    Args:
        deficits: int32[D, R], from `needs.identity_deficits`.
    """
    state, victims, rank = holdings.state, holdings.victims, holdings.rank
    counts, entries, objects = holdings.counts, holdings.entries, holdings.objects
    pools, page = state.capacity.num_pools, state.capacity.page_tokens
    v = len(victims)
    m = int(counts[victims].max(initial=1))
    count = counts[victims]
    # pages[v, r, n]: pages of pool n that the checkpoints up to rank r need
    pages = np.zeros((v, m + 1, pools), np.int32)
    rows = np.flatnonzero(rank >= 0)
    where = holdings.victim_of[state.checkpoint_owner[rows]]
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
