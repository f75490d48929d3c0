"""Who holds what: one row per (owner, object), and the facts of every object that planning needs.

Owns: the sparse owner-object relation of one state, who may change an object, which objects are shared
classes, and `Holdings`, all of it for one revision. Objects are images first, then runs. Owns no option and
no candidate: what is here depends on the state alone, so one revision needs it once, however many requests
are planned on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ninfer_jax.planner.ids import NO_CLASS, NO_EXTENT, NO_IMAGE, NO_OWNER, NO_POOL, NO_SLOT, OwnerKind
from ninfer_jax.planner.state import PhysicalState, eligible, used


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


@dataclass(frozen=True, eq=False)
class PlainLists:
    """Entries and objects as Python lists: what looks at one owner's few objects is faster on those."""

    obj: list[int]
    bits: list[int]
    start: list[int]
    end: list[int]
    item: list[int]
    device: list[bool]
    host: list[bool]
    fixed_device: list[bool]
    fixed_host: list[bool]
    holders: list[int]


@dataclass(frozen=True, eq=False)
class Holdings:
    """What planning derives from one state before it knows a request. Build with `make_holdings`.

    Attributes:
        may_go: owners that may be victims (T-2).
        victim_of: victim row of each owner, or -1.
        rank: rank of each live checkpoint in its owner, 0 shallowest; -1 for free rows.
        counts: live checkpoints of each owner.
        image_bounds: where in `entries` each owner's checkpoint images begin; the next owner's follow.
        run_bounds: the same for its runs, which are sorted by pool and page.
    """

    state: PhysicalState
    may_go: np.ndarray  # bool[O]
    victims: np.ndarray  # int32[V], owner row of each victim row
    victim_of: np.ndarray  # int32[O]
    checkpoints: np.ndarray  # int32[Q], every live checkpoint row
    rank: np.ndarray  # int32[rows]
    counts: np.ndarray  # int32[O]
    entries: Entries
    objects: Objects
    used0: np.ndarray  # int32[R]
    image_bounds: np.ndarray  # int64[O + 1]
    run_bounds: np.ndarray  # int64[O + 1]

    @cached_property
    def shared(self) -> np.ndarray:
        """Returns int64[C], the objects that are classes, in class order."""
        return np.flatnonzero(self.objects.class_of >= 0)

    @cached_property
    def first_owner(self) -> np.ndarray:
        """Returns int32[X], the smallest victim owner row that holds each object; a large number if none."""
        out = np.full(len(self.objects.item), np.iinfo(np.int32).max, np.int32)
        rows = np.flatnonzero(self.entries.victim >= 0)
        np.minimum.at(out, self.entries.obj[rows], self.entries.owner[rows])
        return out

    @cached_property
    def has_shared_owner(self) -> np.ndarray:
        """Returns bool[X], objects that a victim of kind SHARED holds."""
        out = np.zeros(len(self.objects.item), bool)
        entries = self.entries
        is_shared = self.state.owner_kind[entries.owner] == OwnerKind.SHARED
        out[entries.obj[is_shared & (entries.victim >= 0)]] = True
        return out

    @cached_property
    def lists(self) -> PlainLists:
        """Entries and objects as lists."""
        e, o = self.entries, self.objects
        columns = (e.obj, e.bits, e.start, e.end, o.item, o.device, o.host)
        columns += (o.fixed_device, o.fixed_host, o.holders)
        return PlainLists(*(c.tolist() for c in columns))

    @cached_property
    def victim_depth(self) -> int:
        """Returns the largest number of checkpoints of one victim, at least 1."""
        return int(self.counts[self.victims].max(initial=1))

    @cached_property
    def _ranked(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all live checkpoint rows by owner and rank, and where each owner's begin."""
        owner = self.state.checkpoint_owner[self.checkpoints]
        order = np.lexsort((self.rank[self.checkpoints], owner))
        return self.checkpoints[order], np.append(0, np.cumsum(self.counts))

    def checkpoints_of(self, owner: int) -> np.ndarray:
        """Returns int32[M], the owner's checkpoint rows, shallowest first."""
        rows, bounds = self._ranked
        return rows[bounds[owner] : bounds[owner + 1]]

    def entries_of(self, owner: int) -> tuple[slice, slice]:
        """Returns the `entries` rows of an inactive owner's images and of its runs."""
        return (
            slice(int(self.image_bounds[owner]), int(self.image_bounds[owner + 1])),
            slice(int(self.run_bounds[owner]), int(self.run_bounds[owner + 1])),
        )


def make_holdings(state: PhysicalState) -> Holdings:
    """Returns the derived tables of one revision; `make_problem` takes them to plan many requests on it."""
    may_go = eligible(state)
    victims = np.flatnonzero(may_go).astype(np.int32)
    victim_of = np.full(state.num_owners, -1, np.int32)
    victim_of[victims] = np.arange(len(victims), dtype=np.int32)
    rank, counts = checkpoint_ranks(state)
    entries = make_entries(state, victim_of, rank)
    owners = np.arange(state.num_owners + 1)
    num_runs = len(state.space_owner)
    num_images = int(np.count_nonzero(entries.bits))  # checkpoint images come first
    image_bounds = np.searchsorted(entries.owner[:num_images], owners)
    run_bounds = np.searchsorted(state.space_owner, owners) + (len(entries.owner) - num_runs)
    return Holdings(
        state,
        may_go,
        victims,
        victim_of,
        np.flatnonzero(state.checkpoint_owner != NO_OWNER).astype(np.int32),
        rank,
        counts,
        entries,
        make_objects(state, entries, may_go),
        used(state),
        image_bounds,
        run_bounds,
    )


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
