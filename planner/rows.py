"""Row-level editing of a PhysicalState: the steps from which legal operations and transitions are made.

Owns: new, shared, split and freed rows, garbage collection, the final capacity check. A function here may
leave a state that is not yet legal; `operations` and `transition` are what others call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.capacity import axis_names, ceil_div
from ninfer_jax.planner.extents import allocate, release
from ninfer_jax.planner.ids import (
    NO_EXTENT,
    NO_IMAGE,
    NO_OWNER,
    NO_POOL,
    NO_SLOT,
    CheckpointId,
    CheckpointKind,
    ImageId,
    OwnerId,
    OwnerKind,
    RunId,
    Tier,
)
from ninfer_jax.planner.state import PhysicalState, checkpoints_of, space, used


@dataclass(frozen=True)
class CheckpointSpec:
    """One checkpoint to publish.

    Attributes:
        frontier_tokens: execution frontier.
        kv_tokens: typed frontier of each pool; None means `frontier_tokens` in all of them.
        image: an existing image to refer to (aliasing); None makes a new one.
        rebuild: prefill chunks, vision items and patches of a rebuild from root; None means chunks of 1024.
    """

    frontier_tokens: int
    kind: CheckpointKind = CheckpointKind.SESSION_ENDPOINT
    ordinal: int = 0
    kv_tokens: tuple[int, ...] | None = None
    image: ImageId | None = None
    rebuild: tuple[int, int, int] | None = None


def copied(state: PhysicalState) -> PhysicalState:
    """Returns a state whose arrays are fresh copies, so that this file may write into them."""
    arrays = {
        f.name: getattr(state, f.name).copy()
        for f in dataclasses.fields(state)
        if isinstance(getattr(state, f.name), np.ndarray)
    }
    return dataclasses.replace(state, **arrays)


def settled(state: PhysicalState) -> PhysicalState:
    """Returns the garbage-collected state at the next revision, or raises if an axis is over capacity."""
    state = collected(state)
    have, limit = used(state), state.capacity.units()
    if (have > limit).any():
        names = axis_names(state.capacity)
        over = ", ".join(f"{names[r]} {have[r]} > {limit[r]}" for r in np.flatnonzero(have > limit))
        raise ValueError(f"does not fit: {over}; release something first")
    return dataclasses.replace(state, revision=state.revision + 1)


def expect_kind(state: PhysicalState, owner: OwnerId, kind: OwnerKind) -> None:
    """Returns None, or raises if the owner row is of another kind."""
    got = OwnerKind(int(state.owner_kind[owner]))
    if got != kind:
        raise ValueError(f"owner row {owner} is {got.name}, expected {kind.name}")


def kv_tokens_of(spec: CheckpointSpec, pool: int) -> int:
    """Returns the typed frontier of a checkpoint spec."""
    return spec.frontier_tokens if spec.kv_tokens is None else spec.kv_tokens[pool]


def extended(state: PhysicalState, prefix: str, fills: Mapping[str, int]) -> PhysicalState:
    """Returns the state with one more row in every array named `prefix_*`."""
    grown = {}
    for f in dataclasses.fields(state):
        if f.name.startswith(prefix):
            old = getattr(state, f.name)
            row = np.full((1, *old.shape[1:]), fills.get(f.name, 0), old.dtype)
            grown[f.name] = np.concatenate([old, row])
    return dataclasses.replace(state, **grown)


def new_owner(state: PhysicalState, kind: OwnerKind) -> tuple[PhysicalState, OwnerId]:
    """Returns the state with a fresh generation of an owner row of `kind`, and the row."""
    free = np.flatnonzero(state.owner_kind == OwnerKind.FREE)
    if not len(free):
        fills = {"owner_reads": NO_IMAGE, "owner_writes": NO_IMAGE, "owner_lineage": NO_OWNER}
        state = extended(state, "owner_", fills)
        o = state.num_owners
        edges = np.zeros((o, o), bool)
        edges[: o - 1, : o - 1] = state.edges
        state = dataclasses.replace(state, edges=edges)
        free = [o - 1]
    state = copied(state)
    owner = OwnerId(int(free[0]))
    state.owner_kind[owner] = kind
    state.owner_generation[owner] += 1
    state.owner_frontier[owner] = 0
    return state, owner


def free_slot(taken: np.ndarray, slots: int, what: str) -> int:
    """Returns the lowest slot that is not taken, or raises."""
    free = np.setdiff1d(np.arange(slots), taken)
    if not len(free):
        raise ValueError(f"does not fit: no free {what} of {slots}; release something first")
    return int(free[0])


def new_image(state: PhysicalState, tier: Tier) -> tuple[PhysicalState, ImageId]:
    """Returns the state with a new image in `tier`, and its row."""
    free = np.flatnonzero(~state.image_live)
    if not len(free):
        state = extended(state, "image_", {})
        free = [len(state.image_live) - 1]
    state = copied(state)
    image = ImageId(int(free[0]))
    state.image_epoch[image] += 1
    device = host = NO_SLOT
    if tier & Tier.DEVICE:
        taken = state.image_device[state.image_live]
        device = free_slot(taken, state.capacity.device_state_slots, "Device state slot")
    if tier & Tier.HOST:
        taken = state.image_host[state.image_live]
        host = free_slot(taken, state.capacity.host_state_slots, "Host state slot")
    state.image_live[image] = True
    state.image_device[image], state.image_host[image] = device, host
    state.image_device_epoch[image] = state.image_host_epoch[image] = state.image_epoch[image]
    state.image_pins[image] = 0
    return state, image


def new_run(
    state: PhysicalState,
    owner: OwnerId,
    pool: int,
    start: int,
    pages: int,
    columns: int,
    tier: Tier,
    writer: OwnerId | int = NO_OWNER,
) -> tuple[PhysicalState, RunId]:
    """Returns the state with a new run of `pages` pages at `start` of an address space, and its row."""
    free = np.flatnonzero(state.run_pool == NO_POOL)
    if not len(free):
        state = extended(state, "run_", {"run_pool": NO_POOL, "run_host_start": NO_EXTENT})
        free = [len(state.run_pool) - 1]
    state = copied(state)
    run = RunId(int(free[0]))
    if writer == owner:
        serial = int(state.owner_serial[owner, pool]) + start
    else:
        state, serial = new_serials(state, pages)
    state.run_pool[run], state.run_pages[run], state.run_serial[run] = pool, pages, serial
    state.run_epoch[run] += 1
    state.run_device[run], state.run_host_start[run] = False, NO_EXTENT
    state.run_committed[run] = columns
    state.run_device_columns[run] = state.run_host_columns[run] = 0
    state.run_writer[run], state.run_pins[run] = writer, 0
    state = with_entries(state, [(owner, run, start)])
    state = put_run(state, run, tier)
    if columns != state.capacity.page_tokens and pages > 1:
        state = split_at(state, owner, pool, start + pages - 1)
    return state, run


def new_serials(state: PhysicalState, pages: int) -> tuple[PhysicalState, int]:
    """Returns the state with `pages` names of pages given out, and the first of them."""
    return dataclasses.replace(state, next_serial=state.next_serial + pages), state.next_serial


def name_pages(state: PhysicalState, owner: OwnerId, last_page: Sequence[int]) -> PhysicalState:
    """Returns the state in which an active sequence names the pages it will write: one block for each pool.

    Args:
        last_page: end of the address space that the sequence may ever reach, per pool.
    """
    state = copied(state)
    for pool, pages in enumerate(last_page):
        state, state.owner_serial[owner, pool] = new_serials(state, int(pages))
    return state


def put_run(state: PhysicalState, run: RunId, tier: Tier) -> PhysicalState:
    """Returns the state with the run in exactly `tier`, unchecked against Device capacity."""
    state = copied(state)
    pool, pages = int(state.run_pool[run]), int(state.run_pages[run])
    granules = pages * int(state.capacity.page_granules()[pool])
    arena = state.arena
    if tier & Tier.HOST and state.run_host_start[run] == NO_EXTENT:
        got = allocate(arena, granules)
        if got is None:
            raise ValueError(
                f"does not fit: no hole of {granules} granules in the Host arena; release something first"
            )
        arena, state.run_host_start[run] = got
        state.run_host_epoch[run] = state.run_epoch[run]
        state.run_host_columns[run] = state.run_committed[run]
    if tier & Tier.DEVICE and not state.run_device[run]:
        state.run_device[run] = True
        state.run_device_epoch[run] = state.run_epoch[run]
        state.run_device_columns[run] = state.run_committed[run]
    if not tier & Tier.HOST and state.run_host_start[run] != NO_EXTENT:
        arena = release(arena, [(int(state.run_host_start[run]), granules)])
        state.run_host_start[run], state.run_host_columns[run] = NO_EXTENT, 0
    if not tier & Tier.DEVICE:
        state.run_device[run], state.run_device_columns[run] = False, 0
    return dataclasses.replace(state, arena=arena)


def with_entries(state: PhysicalState, entries: Sequence[tuple[int, int, int]]) -> PhysicalState:
    """Returns the state with further (owner, run, start) entries, sorted."""
    rows = np.asarray(entries, np.int32).reshape(-1, 3)
    owner = np.concatenate([state.space_owner, rows[:, 0]])
    run = np.concatenate([state.space_run, rows[:, 1]])
    start = np.concatenate([state.space_start, rows[:, 2]])
    order = np.lexsort((start, state.run_pool[run], owner))
    return dataclasses.replace(
        state, space_owner=owner[order], space_run=run[order], space_start=start[order]
    )


def split_at(state: PhysicalState, owner: OwnerId, pool: int, page: int) -> PhysicalState:
    """Returns the state in which a run boundary of this address space lies at `page`."""
    for run, start in space(state, owner, pool):
        if start < page < start + int(state.run_pages[run]):
            return split_run(state, RunId(run), page - start)[0]
    return state


def split_run(state: PhysicalState, run: RunId, pages: int) -> tuple[PhysicalState, RunId]:
    """Returns the state with the run cut after `pages` pages, and the second part; nothing else changes."""
    total, page = int(state.run_pages[run]), state.capacity.page_tokens
    if not 0 < pages < total:
        raise ValueError(f"cannot cut a run of {total} pages after {pages}")
    free = np.flatnonzero(state.run_pool == NO_POOL)
    if not len(free):
        state = extended(state, "run_", {"run_pool": NO_POOL, "run_host_start": NO_EXTENT})
        free = [len(state.run_pool) - 1]
    state = copied(state)
    new = int(free[0])
    for f in dataclasses.fields(state):
        if f.name.startswith("run_"):
            array = getattr(state, f.name)
            array[new] = array[run]
    state.run_pages[run], state.run_pages[new] = pages, total - pages
    state.run_serial[new] += pages
    state.run_committed[run] = page
    if state.run_device[run]:
        state.run_device_columns[run] = page
    if state.run_host_start[run] != NO_EXTENT:
        state.run_host_columns[run] = page
        granules = int(state.capacity.page_granules()[state.run_pool[run]])
        state.run_host_start[new] = state.run_host_start[run] + pages * granules
    holders = np.flatnonzero(state.space_run == run)
    entries = [(int(state.space_owner[e]), new, int(state.space_start[e]) + pages) for e in holders]
    return with_entries(state, entries), RunId(new)


def merge_writer_runs(state: PhysicalState, owner: OwnerId, pool: int) -> PhysicalState:
    """Returns the state with neighbouring full runs joined that only this writer holds (keeps runs few)."""
    page = state.capacity.page_tokens
    tokens = state.checkpoint_kv_tokens[checkpoints_of(state, owner), pool]
    cuts = set((tokens // page).tolist()) | {ceil_div(int(t), page) for t in tokens}
    rows = space(state, owner, pool)
    i = 0
    while i + 1 < len(rows):
        (a, start), (b, middle) = rows[i], rows[i + 1]
        same = all(
            int(state.run_writer[r]) == owner
            and int(state.run_committed[r]) == page
            and int((state.space_run == r).sum()) == 1
            and int(state.run_pins[r]) == 0
            for r in (a, b)
        )
        follows = int(state.run_serial[b]) == int(state.run_serial[a]) + int(state.run_pages[a])
        if not same or not follows or middle in cuts:
            i += 1
            continue
        state = copied(state)
        state.run_pages[a] += state.run_pages[b]
        keep = state.space_run != b
        state = dataclasses.replace(
            state,
            space_owner=state.space_owner[keep],
            space_run=state.space_run[keep],
            space_start=state.space_start[keep],
        )
        state.run_pool[b] = NO_POOL
        state.run_device[b] = False
        rows[i : i + 2] = [(a, start)]
    return state


def refer(state: PhysicalState, owner: OwnerId, source: OwnerId, pool: int, pages: int) -> PhysicalState:
    """Returns the state in which `owner` also refers to the source's first `pages` pages."""
    state = split_at(state, source, pool, pages)
    rows = [(run, start) for run, start in space(state, source, pool) if start < pages]
    covered = rows[-1][1] + int(state.run_pages[rows[-1][0]]) if rows else 0
    if covered < pages:
        raise ValueError(f"owner row {source} has {covered} pages of pool {pool}, cannot share {pages}")
    return with_entries(state, [(owner, run, start) for run, start in rows])


def new_checkpoint(
    state: PhysicalState, owner: OwnerId, spec: CheckpointSpec, tier: Tier
) -> tuple[PhysicalState, CheckpointId]:
    """Returns the state with a checkpoint of `owner`, its runs split where it ends, and its row."""
    page, pools = state.capacity.page_tokens, state.capacity.num_pools
    image = spec.image
    if image is None:
        state, image = new_image(state, tier)
    free = np.flatnonzero(state.checkpoint_owner == NO_OWNER)
    if not len(free):
        state = extended(state, "checkpoint_", {"checkpoint_owner": NO_OWNER, "checkpoint_image": NO_IMAGE})
        free = [len(state.checkpoint_owner) - 1]
    kv = [kv_tokens_of(spec, pool) for pool in range(pools)]
    state = copied(state)
    row = CheckpointId(int(free[0]))
    state.checkpoint_owner[row], state.checkpoint_image[row] = owner, image
    state.checkpoint_kind[row], state.checkpoint_ordinal[row] = spec.kind, spec.ordinal
    state.checkpoint_frontier[row] = spec.frontier_tokens
    state.checkpoint_kv_tokens[row] = kv
    state.checkpoint_rebuild[row] = spec.rebuild or (ceil_div(spec.frontier_tokens, 1024), 0, 0)
    if state.owner_kind[owner] != OwnerKind.ACTIVE:
        state.owner_frontier[owner] = np.maximum(state.owner_frontier[owner], kv)
    for pool in range(pools):
        for cut in (kv[pool] // page, ceil_div(kv[pool], page)):
            state = split_at(state, owner, pool, cut)
    return state, row


def free_checkpoint(state: PhysicalState, checkpoint: int) -> PhysicalState:
    """Returns the state with the checkpoint row free."""
    state = copied(state)
    state.checkpoint_owner[checkpoint] = NO_OWNER
    state.checkpoint_image[checkpoint] = NO_IMAGE
    return state


def free_owner(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state with the owner row, its checkpoints, edges and references free."""
    state = copied(state)
    mine = state.checkpoint_owner == owner
    state.checkpoint_owner[mine], state.checkpoint_image[mine] = NO_OWNER, NO_IMAGE
    state.owner_kind[owner] = OwnerKind.FREE
    state.owner_reads[owner] = state.owner_writes[owner] = NO_IMAGE
    state.owner_reserved_pages[owner] = 0
    state.owner_reserved_states[owner] = 0
    state.owner_pins[owner] = 0
    state.owner_lineage[owner] = NO_OWNER
    state.owner_frontier[owner] = 0
    state.edges[owner], state.edges[:, owner] = False, False
    state.run_writer[state.run_writer == owner] = NO_OWNER
    keep = state.space_owner != owner
    return dataclasses.replace(
        state,
        space_owner=state.space_owner[keep],
        space_run=state.space_run[keep],
        space_start=state.space_start[keep],
    )


def cut_space(state: PhysicalState, owner: OwnerId, pool: int, pages: int) -> PhysicalState:
    """Returns the state in which the owner's address space of `pool` ends at `pages` (a run boundary)."""
    mine = (state.space_owner == owner) & (state.run_pool[state.space_run] == pool)
    keep = ~(mine & (state.space_start >= pages))
    return dataclasses.replace(
        state,
        space_owner=state.space_owner[keep],
        space_run=state.space_run[keep],
        space_start=state.space_start[keep],
    )


def trim_space(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state with an inactive owner's address space as long as its deepest checkpoint needs."""
    if state.owner_kind[owner] not in (OwnerKind.PRIVATE, OwnerKind.SHARED):
        return state
    state = copied(state)
    rows = checkpoints_of(state, owner)
    state.owner_frontier[owner] = state.checkpoint_kv_tokens[rows].max(0)
    for pool in range(state.capacity.num_pools):
        pages = ceil_div(int(state.owner_frontier[owner, pool]), state.capacity.page_tokens)
        state = cut_space(split_at(state, owner, pool, pages), owner, pool, pages)
    return state


def collected(state: PhysicalState) -> PhysicalState:
    """Returns the state without zero-reference objects (T-2); pinned ones stay.

    Runs that only active sequences hold lose their Host replica: nothing will ever restore from it.
    """
    state = copied(state)
    dormant = np.zeros(len(state.run_pool), bool)
    dormant[state.space_run[state.owner_kind[state.space_owner] != OwnerKind.ACTIVE]] = True
    useless = (state.run_host_start != NO_EXTENT) & state.run_device & ~dormant & (state.run_pins == 0)
    for run in np.flatnonzero(useless & (state.run_pool != NO_POOL)):
        state = put_run(state, RunId(int(run)), Tier.DEVICE)
    held = np.zeros(len(state.image_live), bool)
    for refs in (state.checkpoint_image, state.owner_writes, state.owner_reads):
        held[refs[refs != NO_IMAGE]] = True
    gone = state.image_live & ~held & (state.image_pins == 0)
    state.image_live[gone] = False
    state.image_device[gone] = state.image_host[gone] = NO_SLOT
    kept = np.zeros(len(state.run_pool), bool)
    kept[state.space_run] = True
    lost = np.flatnonzero((state.run_pool != NO_POOL) & ~kept & (state.run_pins == 0))
    granules = state.capacity.page_granules()
    freed = [
        (int(state.run_host_start[r]), int(state.run_pages[r]) * int(granules[state.run_pool[r]]))
        for r in lost
        if state.run_host_start[r] != NO_EXTENT
    ]
    state.run_pool[lost], state.run_device[lost] = NO_POOL, False
    state.run_host_start[lost], state.run_writer[lost] = NO_EXTENT, NO_OWNER
    return dataclasses.replace(state, arena=release(state.arena, freed)) if freed else state
