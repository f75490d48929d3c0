"""PhysicalState: one immutable revision of everything that occupies memory, and what it uses.

Owns: the rows of unique objects (StateImages, page runs), their replicas, who refers to them, active
reservations, pins and owner edges; `used(state)`. Changes come from `operations`; the checks are in
`invariants`. Physical page ids stay with the program's stores: a row here says what a page *is*.

Letters: O owner rows, Q checkpoint rows, S image rows, U run rows, E address-space entries, N pools,
R axes. Rows are reused; a free row has kind FREE, owner NO_OWNER, or pool NO_POOL.

**Runs.** A page has an epoch, columns, references, at most one writer, replicas and pins (K-3). Neighbouring
pages of one address space that agree in all of these form one *run*, and the run is the row. Runs are split
where a checkpoint or a fork ends (at both sides of a partial tail page), so that every holder of a run holds
all of its pages, and a partly filled page is always a run of one page. State size and planning time follow
the number of runs, not of pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, HOST_KV, HOST_STATE, PhysicalCapacity
from ninfer_jax.planner.extents import HostArena, make_arena
from ninfer_jax.planner.ids import (
    NO_EXTENT,
    NO_IMAGE,
    NO_OWNER,
    NO_SLOT,
    CheckpointKind,
    CheckpointRef,
    Generation,
    OwnerId,
    OwnerKind,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PhysicalState:
    """One stable (or intermediate) physical state. Compare with `chex.assert_trees_all_equal`.

    Attributes:
        capacity: the fixed capacity vector (static).
        revision: `resource_revision` (R-11).
        open_transaction: whether the one global transition is running (X-6).
        arena: free space of the Host KV arena.
        owner_reads: image the next step reads; differs from the written one while a Fork is unsettled (S-4).
        owner_writes: image the active sequence writes.
        owner_reserved_pages: active growth that is not materialised yet (R-4), per pool.
        owner_reserved_states: Device images promised to an active owner and not materialised.
        owner_frontier: committed tokens per pool; of an inactive owner those of its deepest checkpoint.
        owner_lineage: owner row whose continuation an active sequence consumed; NO_OWNER otherwise.
        owner_serial: serial of logical page 0 of what an active sequence writes; page p of its own is named
            ``owner_serial + p``.
        next_serial: no page has had this serial or a larger one.
        edges: ``edges[a, o]``: active owner a protects inactive owner o until its terminal settlement (D-3).
        checkpoint_kv_tokens: tokens of each pool that the checkpoint requires (typed frontier, K-1).
        checkpoint_rebuild: prefill chunks, vision items and vision patches of a rebuild from root (C-7).
        image_epoch: content version; a replica serves iff its own epoch equals it (K-3, C-5).
        image_device: Device slot or NO_SLOT. image_host: Host slot or NO_SLOT.
        run_serial: name of the run's first page, later pages count on. A serial is never given twice (K-3,
            generation): by it the program finds the physical page, however runs are split and joined.
        run_committed: columns written in the run's last page; earlier pages are full.
        run_device_columns: columns the Device replica holds in the last page (0: no replica).
        run_host_start: first granule of the Host replica or NO_EXTENT; pages lie in order.
        run_writer: the active owner that may append, or NO_OWNER (one writer at most).
        space_start: logical page at which the run begins in that owner's address space of the pool.
    """

    capacity: PhysicalCapacity = field(metadata={"static": True})
    revision: int
    open_transaction: bool
    next_serial: int
    arena: HostArena

    owner_kind: np.ndarray  # int8[O], OwnerKind
    owner_generation: np.ndarray  # int32[O]
    owner_pins: np.ndarray  # int32[O]
    owner_reads: np.ndarray  # int32[O], image row
    owner_writes: np.ndarray  # int32[O], image row
    owner_reserved_pages: np.ndarray  # int32[O, N]
    owner_reserved_states: np.ndarray  # int32[O]
    owner_frontier: np.ndarray  # int32[O, N], tokens
    owner_lineage: np.ndarray  # int32[O], owner row
    owner_serial: np.ndarray  # int64[O, N]
    edges: np.ndarray  # bool[O, O]

    checkpoint_owner: np.ndarray  # int32[Q], NO_OWNER when free
    checkpoint_kind: np.ndarray  # int8[Q], CheckpointKind
    checkpoint_ordinal: np.ndarray  # int32[Q]
    checkpoint_frontier: np.ndarray  # int32[Q], tokens
    checkpoint_image: np.ndarray  # int32[Q]
    checkpoint_kv_tokens: np.ndarray  # int32[Q, N]
    checkpoint_rebuild: np.ndarray  # int32[Q, 3]

    image_live: np.ndarray  # bool[S]
    image_device: np.ndarray  # int32[S], slot
    image_host: np.ndarray  # int32[S], slot
    image_epoch: np.ndarray  # int32[S]
    image_device_epoch: np.ndarray  # int32[S]
    image_host_epoch: np.ndarray  # int32[S]
    image_pins: np.ndarray  # int32[S]

    run_pool: np.ndarray  # int32[U], NO_POOL when free
    run_pages: np.ndarray  # int32[U]
    run_serial: np.ndarray  # int64[U]
    run_device: np.ndarray  # bool[U]
    run_host_start: np.ndarray  # int32[U], granule
    run_epoch: np.ndarray  # int32[U]
    run_device_epoch: np.ndarray  # int32[U]
    run_host_epoch: np.ndarray  # int32[U]
    run_committed: np.ndarray  # int32[U], columns
    run_device_columns: np.ndarray  # int32[U], columns
    run_host_columns: np.ndarray  # int32[U], columns
    run_writer: np.ndarray  # int32[U], owner row
    run_pins: np.ndarray  # int32[U]

    space_owner: np.ndarray  # int32[E]
    space_run: np.ndarray  # int32[E]
    space_start: np.ndarray  # int32[E], sorted by (owner, pool, start)

    @property
    def num_owners(self) -> int:
        """O, owner rows in use or free."""
        return len(self.owner_kind)


def make_state(capacity: PhysicalCapacity, *, num_owners: int = 8, revision: int = 0) -> PhysicalState:
    """Returns an empty state: nothing allocated, every owner row free.

    Args:
        num_owners: owner rows to start with (lanes + private + shared cells); operations add rows if needed.

    >>> from ninfer_jax.planner.capacity import make_capacity
    >>> state = make_state(make_capacity(device_state_slots=2, device_pages=12))
    >>> used(state).tolist()
    [0, 0, 0, 0]
    """
    n = capacity.num_pools

    def ints(*shape: int, fill: int = 0, dtype: type = np.int32) -> np.ndarray:
        return np.full(shape, fill, dtype)

    o = num_owners
    return PhysicalState(
        capacity=capacity,
        revision=revision,
        open_transaction=False,
        next_serial=0,
        arena=make_arena(capacity.host_kv_granules),
        owner_kind=ints(o, dtype=np.int8),
        owner_generation=ints(o),
        owner_pins=ints(o),
        owner_reads=ints(o, fill=NO_IMAGE),
        owner_writes=ints(o, fill=NO_IMAGE),
        owner_reserved_pages=ints(o, n),
        owner_reserved_states=ints(o),
        owner_frontier=ints(o, n),
        owner_lineage=ints(o, fill=NO_OWNER),
        owner_serial=ints(o, n, dtype=np.int64),
        edges=np.zeros((o, o), bool),
        checkpoint_owner=ints(0),
        checkpoint_kind=ints(0, dtype=np.int8),
        checkpoint_ordinal=ints(0),
        checkpoint_frontier=ints(0),
        checkpoint_image=ints(0),
        checkpoint_kv_tokens=ints(0, n),
        checkpoint_rebuild=ints(0, 3),
        image_live=np.zeros(0, bool),
        image_device=ints(0),
        image_host=ints(0),
        image_epoch=ints(0),
        image_device_epoch=ints(0),
        image_host_epoch=ints(0),
        image_pins=ints(0),
        run_pool=ints(0),
        run_pages=ints(0),
        run_serial=ints(0, dtype=np.int64),
        run_device=np.zeros(0, bool),
        run_host_start=ints(0),
        run_epoch=ints(0),
        run_device_epoch=ints(0),
        run_host_epoch=ints(0),
        run_committed=ints(0),
        run_device_columns=ints(0),
        run_host_columns=ints(0),
        run_writer=ints(0),
        run_pins=ints(0),
        space_owner=ints(0),
        space_run=ints(0),
        space_start=ints(0),
    )


def used(state: PhysicalState) -> np.ndarray:
    """Returns int32[R]: unique allocations plus concrete reservations of each axis (R-4, R-5).

    Every object is one row, so references can neither multiply an allocation nor hide it.
    """
    capacity = state.capacity
    total = np.zeros(capacity.num_axes, np.int64)
    live = state.image_live
    total[DEVICE_STATE] = np.count_nonzero(live & (state.image_device != NO_SLOT))
    total[DEVICE_STATE] += state.owner_reserved_states.sum()
    total[HOST_STATE] = np.count_nonzero(live & (state.image_host != NO_SLOT))
    granules = capacity.page_granules()
    for pool in range(capacity.num_pools):
        mine = state.run_pool == pool
        on_host = mine & (state.run_host_start != NO_EXTENT)
        total[HOST_KV] += int(state.run_pages[on_host].sum()) * int(granules[pool])
        total[DEVICE_PAGES + pool] = state.run_pages[mine & state.run_device].sum()
    total[DEVICE_PAGES:] += state.owner_reserved_pages.sum(0)
    return total.astype(np.int32)


def exclusive(state: PhysicalState, owner: OwnerId) -> np.ndarray:
    """Returns int32[R]: what settles if this owner alone goes (R-6); shared objects never."""
    held_images = owner_images(state)
    total = np.zeros(state.capacity.num_axes, np.int64)
    mine = np.unique(held_images[held_images[:, 0] == owner, 1])
    others = np.unique(held_images[held_images[:, 0] != owner, 1])
    alone = np.setdiff1d(mine, others)
    total[DEVICE_STATE] = np.count_nonzero(state.image_device[alone] != NO_SLOT)
    total[DEVICE_STATE] += state.owner_reserved_states[owner]
    total[HOST_STATE] = np.count_nonzero(state.image_host[alone] != NO_SLOT)
    runs = np.setdiff1d(
        state.space_run[state.space_owner == owner], state.space_run[state.space_owner != owner]
    )
    granules = state.capacity.page_granules()
    for run in runs:
        pool = int(state.run_pool[run])
        if state.run_device[run]:
            total[DEVICE_PAGES + pool] += state.run_pages[run]
        if state.run_host_start[run] != NO_EXTENT:
            total[HOST_KV] += int(state.run_pages[run]) * int(granules[pool])
    total[DEVICE_PAGES:] += state.owner_reserved_pages[owner]
    return total.astype(np.int32)


def owner_images(state: PhysicalState) -> np.ndarray:
    """Returns int32[M, 2], (owner, image) for every reference an owner has to an image; may repeat a pair.

    A borrowed read is left out: the surviving owner graph holds it (S-4).
    """
    live = np.flatnonzero(state.checkpoint_owner != NO_OWNER)
    writers = np.flatnonzero(state.owner_writes != NO_IMAGE)
    return np.stack(
        [
            np.concatenate([state.checkpoint_owner[live], writers.astype(np.int32)]),
            np.concatenate([state.checkpoint_image[live], state.owner_writes[writers]]),
        ],
        1,
    ).astype(np.int32)


def checkpoints_of(state: PhysicalState, owner: OwnerId) -> np.ndarray:
    """Returns int[M], the owner's checkpoint rows, shallowest first (ties by kind, then ordinal)."""
    rows = np.flatnonzero(state.checkpoint_owner == owner)
    keys = (state.checkpoint_ordinal[rows], state.checkpoint_kind[rows], state.checkpoint_frontier[rows])
    return rows[np.lexsort(keys)]


def checkpoint_ref(state: PhysicalState, checkpoint: int) -> CheckpointRef:
    """Returns the identity of a checkpoint row that survives row reuse (X-8)."""
    owner = OwnerId(int(state.checkpoint_owner[checkpoint]))
    if owner == NO_OWNER:
        raise ValueError(f"checkpoint row {checkpoint} is free; read rows from checkpoints_of()")
    return CheckpointRef(
        owner,
        Generation(int(state.owner_generation[owner])),
        CheckpointKind(int(state.checkpoint_kind[checkpoint])),
        int(state.checkpoint_ordinal[checkpoint]),
    )


def pages_of(tokens: np.ndarray | int, page_tokens: int) -> np.ndarray:
    """Returns the pages that cover `tokens`, partly filled one included."""
    return -(-np.asarray(tokens) // page_tokens)


def is_valid(state: PhysicalState, checkpoint: int) -> bool:
    """Returns whether the checkpoint can still be restored at all (C-5, K-6).

    The image needs one complete replica of the right epoch; every required page one replica with the right
    epoch and enough columns.
    """
    owner = int(state.checkpoint_owner[checkpoint])
    image = int(state.checkpoint_image[checkpoint])
    if owner == NO_OWNER or image == NO_IMAGE or not state.image_live[image]:
        return False
    on_device = state.image_device[image] != NO_SLOT and (
        state.image_device_epoch[image] == state.image_epoch[image]
    )
    on_host = state.image_host[image] != NO_SLOT and state.image_host_epoch[image] == state.image_epoch[image]
    return bool(on_device or on_host) and _covered(state, checkpoint, device_only=False)


def is_device_ready(state: PhysicalState, checkpoint: int) -> bool:
    """Returns whether state and every required page are on Device; the future reservation is asked apart."""
    image = int(state.checkpoint_image[checkpoint])
    return (
        is_valid(state, checkpoint)
        and state.image_device[image] != NO_SLOT
        and _covered(state, checkpoint, device_only=True)
    )


def _covered(state: PhysicalState, checkpoint: int, *, device_only: bool) -> bool:
    """Returns whether each page that the checkpoint requires has a serving replica."""
    owner = int(state.checkpoint_owner[checkpoint])
    page = state.capacity.page_tokens
    for pool in range(state.capacity.num_pools):
        tokens = int(state.checkpoint_kv_tokens[checkpoint, pool])
        at = 0
        for run, start in space(state, OwnerId(owner), pool):
            if start * page >= tokens:
                break
            end = start + int(state.run_pages[run])
            columns = min(page, tokens - (end - 1) * page) if tokens < end * page else page
            if columns <= 0:  # the run reaches past the frontier: not split, so not a legal state
                return False
            device = state.run_device[run] and state.run_device_epoch[run] == state.run_epoch[run]
            device = device and state.run_device_columns[run] >= columns
            host = state.run_host_start[run] != NO_EXTENT and (
                state.run_host_epoch[run] == state.run_epoch[run] and state.run_host_columns[run] >= columns
            )
            if not (device or (host and not device_only)):
                return False
            at = end
        if at * page < tokens:
            return False
    return True


def space(state: PhysicalState, owner: OwnerId, pool: int) -> list[tuple[int, int]]:
    """Returns ``(run, start page)`` of one address space in order."""
    rows = np.flatnonzero((state.space_owner == owner) & (state.run_pool[state.space_run] == pool))
    return [(int(state.space_run[e]), int(state.space_start[e])) for e in rows]


def eligible(state: PhysicalState) -> np.ndarray:
    """Returns bool[O]: inactive owners without pin and without an active owner's edge (T-2)."""
    inactive = (state.owner_kind == OwnerKind.PRIVATE) | (state.owner_kind == OwnerKind.SHARED)
    active = state.owner_kind == OwnerKind.ACTIVE
    protected = (state.edges & active[:, None]).any(0)
    return inactive & ~protected & (state.owner_pins == 0)
