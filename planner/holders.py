"""Who holds what: one row per (owner, object), and the facts of every object that planning needs.

Owns: the sparse owner-object relation of one state, who may change an object, and which objects are shared
classes. Objects are images first, then runs. Owns no option and no candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.ids import NO_CLASS, NO_EXTENT, NO_IMAGE, NO_OWNER, NO_POOL, NO_SLOT, OwnerKind
from ninfer_jax.planner.state import PhysicalState


@dataclass(frozen=True, eq=False)
class Entries:
    """Who holds what, one row per (owner, object); object ids are images first, then runs."""

    owner: np.ndarray  # int32[E]
    obj: np.ndarray  # int32[E]
    bits: np.ndarray  # int32[E], checkpoints (by depth) that refer to the image; 0 for runs
    start: np.ndarray  # int32[E], first logical page; 0 for images
    end: np.ndarray  # int32[E], one past the last page; 0 for images
    victim: np.ndarray  # int32[E], victim row or -1


@dataclass(frozen=True, eq=False)
class Objects:
    """Facts of every object row."""

    item: np.ndarray  # int32[X], 0 image, 1 + pool for runs, -1 free row
    size: np.ndarray  # int32[X], images 1, runs their pages
    device: np.ndarray  # bool[X]
    host: np.ndarray  # bool[X]
    fixed_device: np.ndarray  # bool[X], needed there by an owner outside the domain, or pinned
    fixed_host: np.ndarray  # bool[X]
    holders: np.ndarray  # int32[X], eligible owners that hold it
    class_of: np.ndarray  # int32[X], class row or NO_CLASS


def checkpoint_ranks(state: PhysicalState) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32[Q] rank of every live checkpoint within its owner (0 shallowest), int32[O] counts."""
    rows = np.flatnonzero(state.checkpoint_owner != NO_OWNER)
    owner = state.checkpoint_owner[rows]
    order = np.lexsort(
        (state.checkpoint_ordinal[rows], state.checkpoint_kind[rows], state.checkpoint_frontier[rows], owner)
    )
    counts = np.bincount(owner, minlength=state.num_owners).astype(np.int32)
    first = np.cumsum(counts) - counts
    rank = np.full(len(state.checkpoint_owner), -1, np.int32)
    rank[rows[order]] = np.arange(len(rows)) - first[owner[order]]
    return rank, counts


def make_entries(state: PhysicalState, victim_of: np.ndarray, rank: np.ndarray) -> Entries:
    """Returns all holders: images by owner first, then active writers, then runs by owner, pool and page.

    Args:
        victim_of: int32[O], victim row of each owner, or -1.
        rank: int32[Q], from `checkpoint_ranks`.
    """
    rows = np.flatnonzero(state.checkpoint_owner != NO_OWNER)
    owner, image = state.checkpoint_owner[rows], state.checkpoint_image[rows]
    num_images = max(len(state.image_live), 1)
    key, inverse = np.unique(owner.astype(np.int64) * num_images + image, return_inverse=True)
    bits = np.zeros(len(key), np.int64)
    np.bitwise_or.at(bits, inverse, np.int64(1) << rank[rows].astype(np.int64))
    writers = np.flatnonzero(state.owner_writes != NO_IMAGE)
    all_owner = np.concatenate([key // num_images, writers, state.space_owner]).astype(np.int32)
    all_obj = np.concatenate(
        [key % num_images, state.owner_writes[writers], state.space_run + len(state.image_live)]
    )
    heads = np.zeros(len(key) + len(writers), np.int32)
    return Entries(
        all_owner,
        all_obj.astype(np.int32),
        np.concatenate([bits, np.zeros(len(writers) + len(state.space_run), np.int64)]).astype(np.int32),
        np.concatenate([heads, state.space_start]),
        np.concatenate([heads, state.space_start + state.run_pages[state.space_run]]).astype(np.int32),
        victim_of[all_owner],
    )


def make_objects(state: PhysicalState, entries: Entries, may_go: np.ndarray) -> Objects:
    """Returns the facts of every object, shared classes numbered.

    Args:
        may_go: bool[O], the owners that are victims.
    """
    run_item = np.where(state.run_pool == NO_POOL, -1, state.run_pool + 1)
    item = np.concatenate([np.where(state.image_live, 0, -1), run_item])
    size = np.concatenate([np.ones(len(state.image_live), np.int32), state.run_pages])
    device = np.concatenate([state.image_live & (state.image_device != NO_SLOT), state.run_device])
    image_host = state.image_live & (state.image_host != NO_SLOT)
    host = np.concatenate([image_host, state.run_host_start != NO_EXTENT])
    pinned = np.concatenate([state.image_pins, state.run_pins]) > 0
    fixed_entry = ~may_go[entries.owner]
    active_entry = state.owner_kind[entries.owner] == OwnerKind.ACTIVE
    kept_checkpoint = fixed_entry & (~active_entry | (entries.bits != 0))
    fixed_device, fixed_host = pinned & device, pinned & host
    fixed_device[entries.obj[fixed_entry]] = True
    fixed_device &= device
    keeps_host = np.zeros(len(item), bool)
    keeps_host[entries.obj[kept_checkpoint]] = True
    fixed_host |= keeps_host & host
    holders = np.bincount(entries.obj[may_go[entries.owner]], minlength=len(item)).astype(np.int32)
    pinned_down = (fixed_device == device) & (fixed_host == host)
    shared = ((holders > 1) | ((holders == 1) & (fixed_device | fixed_host))) & ~pinned_down
    class_of = np.full(len(item), NO_CLASS, np.int32)
    class_of[shared] = np.arange(np.count_nonzero(shared))
    return Objects(
        item.astype(np.int32),
        size.astype(np.int32),
        device,
        host,
        fixed_device,
        fixed_host,
        holders,
        class_of,
    )
