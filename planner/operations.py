"""Legal operations on a PhysicalState: each returns a new state, and a new revision where R-11 asks for one.

Owns: building and changing states step by step, for tests, research code and the program's zero-stage
transitions. Owns no choice. Research code starts here: `make_state`, `add_owner`, `activate_root`, `advance`,
`capture`, `finish`, `demote`, `drop_checkpoint`, `evict`.

An operation that would exceed a capacity raises ValueError: these are commands, not proposals. Proposals are
targets, and for them "does not fit" is a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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


# ---------------------------------------------------------------- building


def add_owner(
    state: PhysicalState,
    checkpoints: Sequence[CheckpointSpec],
    *,
    kind: OwnerKind = OwnerKind.PRIVATE,
    kv_tier: Tier = Tier.DEVICE,
    state_tier: Tier = Tier.DEVICE,
    share_with: OwnerId | None = None,
    share_tokens: int | Sequence[int] = 0,
    share_tail: bool = False,
) -> tuple[PhysicalState, OwnerId]:
    """Returns the state with one more inactive owner, and its row.

    Args:
        checkpoints: at least one; the deepest one of each pool sets the length of the address space.
        kv_tier, state_tier: where the new pages and new images are.
        share_with: owner whose first `share_tokens` tokens the new one refers to instead of having pages.
        share_tokens: one number, or one per pool. Full pages are shared; the partial tail page is the new
            owner's own copy unless `share_tail`.
    Raises:
        ValueError: if it does not fit, or the shared range is longer than the source.

    >>> from ninfer_jax.planner.capacity import make_capacity
    >>> from ninfer_jax.planner.state import make_state
    >>> state = make_state(make_capacity(device_state_slots=2, device_pages=12))
    >>> state, x = add_owner(state, [CheckpointSpec(130)])
    >>> used(state).tolist()
    [1, 0, 0, 3]
    """
    if not checkpoints:
        raise ValueError("an owner without a checkpoint holds nothing recoverable; give at least one")
    if kind not in (OwnerKind.PRIVATE, OwnerKind.SHARED):
        raise ValueError(f"add_owner makes inactive owners, got {kind.name}; use activate_root")
    page, pools = state.capacity.page_tokens, state.capacity.num_pools
    state, owner = _new_owner(state, kind)
    shares = [share_tokens] * pools if isinstance(share_tokens, int) else list(share_tokens)
    for pool in range(pools):
        total = max(_kv_tokens(spec, pool) for spec in checkpoints)
        shared_pages = 0
        if share_with is not None and shares[pool]:
            if shares[pool] > total:
                raise ValueError(f"cannot share {shares[pool]} tokens of an owner with only {total}")
            shared_pages = ceil_div(shares[pool], page) if share_tail else shares[pool] // page
            state = _refer(state, owner, share_with, pool, shared_pages)
        rest = ceil_div(total, page) - shared_pages
        if rest > 0:
            columns = total - (ceil_div(total, page) - 1) * page
            state, _ = _new_run(state, owner, pool, shared_pages, rest, columns, kv_tier)
    for spec in checkpoints:
        state, _ = _add_checkpoint(state, owner, spec, state_tier)
    return _settle(state), owner


def activate_root(
    state: PhysicalState, capacity_tokens: int | Sequence[int]
) -> tuple[PhysicalState, OwnerId]:
    """Returns the state with a new active sequence that starts from root, image and reservation (A-1)."""
    pools, page = state.capacity.num_pools, state.capacity.page_tokens
    tokens = [capacity_tokens] * pools if isinstance(capacity_tokens, int) else list(capacity_tokens)
    state, owner = _new_owner(state, OwnerKind.ACTIVE)
    state, image = _new_image(state, Tier.DEVICE)
    state = _copy(state)
    state.owner_reads[owner] = state.owner_writes[owner] = image
    state.owner_reserved_pages[owner] = [ceil_div(t, page) for t in tokens]
    return _settle(state), owner


# ---------------------------------------------------------------- active sequences


def advance(state: PhysicalState, owner: OwnerId, frontier: int | Sequence[int]) -> PhysicalState:
    """Returns the state after the active sequence committed tokens up to `frontier`; same revision (R-11).

    Pages are converted from the reservation one for one, so `used` does not change.

    Raises:
        ValueError: if a frontier goes backwards or beyond the reservation (A-4).
    """
    _expect(state, owner, OwnerKind.ACTIVE)
    pools, page = state.capacity.num_pools, state.capacity.page_tokens
    goal = [frontier] * pools if isinstance(frontier, int) else list(frontier)
    state = settle_fork(state, owner)
    for pool in range(pools):
        have, want = int(state.owner_frontier[owner, pool]), goal[pool]
        if want < have:
            raise ValueError(f"frontier {want} is below the committed {have}; use truncate")
        if want == have:
            continue
        rows = space(state, owner, pool)
        mapped = rows[-1][1] + int(state.run_pages[rows[-1][0]]) if rows else 0
        extra = ceil_div(want, page) - mapped
        if extra > int(state.owner_reserved_pages[owner, pool]):
            raise ValueError(
                f"frontier {want} needs {extra} more pages, reserved are "
                f"{int(state.owner_reserved_pages[owner, pool])}: no step may exceed the entitlement"
            )
        columns = want - (ceil_div(want, page) - 1) * page
        state = _copy(state)
        if have % page:
            tail = rows[-1][0]
            filled = columns if extra <= 0 else page
            state.run_committed[tail] = state.run_device_columns[tail] = filled
        if extra > 0:
            state.owner_reserved_pages[owner, pool] -= extra
            state, _ = _new_run(state, owner, pool, mapped, extra, columns, Tier.DEVICE, writer=owner)
            if columns != page and extra > 1:
                state = _split_at(state, owner, pool, mapped + extra - 1)
            state = _merge_writer_runs(state, owner, pool)
        state = _copy(state)
        state.owner_frontier[owner, pool] = want
    return state


def truncate(state: PhysicalState, owner: OwnerId, frontier: int | Sequence[int]) -> PhysicalState:
    """Returns the state after a rollback: unmapped pages return to the reservation (A-2)."""
    _expect(state, owner, OwnerKind.ACTIVE)
    pools, page = state.capacity.num_pools, state.capacity.page_tokens
    goal = [frontier] * pools if isinstance(frontier, int) else list(frontier)
    floor = [
        max((int(state.checkpoint_kv_tokens[c, n]) for c in checkpoints_of(state, owner)), default=0)
        for n in range(pools)
    ]
    for pool in range(pools):
        keep = ceil_div(goal[pool], page)
        if goal[pool] > int(state.owner_frontier[owner, pool]) or goal[pool] < floor[pool]:
            raise ValueError(
                f"truncate to {goal[pool]}: expected {floor[pool]}..{int(state.owner_frontier[owner, pool])}"
            )
        rows = space(state, owner, pool)
        mapped = rows[-1][1] + int(state.run_pages[rows[-1][0]]) if rows else 0
        if keep < mapped:
            state = _split_at(state, owner, pool, keep)
            state = _cut_space(state, owner, pool, keep)
            state = _copy(state)
            state.owner_reserved_pages[owner, pool] += mapped - keep
        if goal[pool] % page and goal[pool] < int(state.owner_frontier[owner, pool]):
            state = _split_at(state, owner, pool, keep - 1)
            run = space(state, owner, pool)[-1][0]
            state = _copy(state)
            state.run_committed[run] = state.run_device_columns[run] = goal[pool] - (keep - 1) * page
        state = _copy(state)
        state.owner_frontier[owner, pool] = goal[pool]
    return _collect(state)


def settle_fork(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state after the sequence's first state-writing commit: it reads what it writes (S-3)."""
    if state.owner_reads[owner] == state.owner_writes[owner]:
        return state
    state = _copy(state)
    state.image_pins[state.owner_reads[owner]] -= 1
    state.owner_reads[owner] = state.owner_writes[owner]
    return _collect(state)


def capture(
    state: PhysicalState,
    owner: OwnerId,
    spec: CheckpointSpec,
    *,
    shared: bool,
    state_tier: Tier = Tier.DEVICE,
) -> tuple[PhysicalState, OwnerId]:
    """Returns the state after a snapshot of the active sequence at its frontier, and who owns the checkpoint.

    The private kind copies no KV: the one writer goes on behind protected columns. The shared kind leaves the
    partial tail page of each unaligned pool with the checkpoint and copies it once as the new writer (K-5).

    Raises:
        ValueError: if `spec` is not at the committed frontier, or the copies do not fit.
    """
    _expect(state, owner, OwnerKind.ACTIVE)
    page = state.capacity.page_tokens
    frontier = tuple(int(t) for t in state.owner_frontier[owner])
    if spec.kv_tokens is None:
        spec = dataclasses.replace(spec, kv_tokens=frontier)
    if spec.kv_tokens != frontier:
        raise ValueError(f"captures are taken at the frontier {frontier}, got {spec.kv_tokens}")
    holder = owner
    if shared:
        state, holder = _new_owner(state, OwnerKind.SHARED)
        for pool, tokens in enumerate(frontier):
            pages = ceil_div(tokens, page)
            state = _refer(state, holder, owner, pool, pages)
            if tokens % page:
                state = _split_at(state, owner, pool, pages - 1)
                tail = space(state, owner, pool)[-1][0]
                state = _cut_space(state, owner, pool, pages - 1)
                columns = int(state.run_committed[tail])
                state = _copy(state)
                state.run_writer[tail] = NO_OWNER
                state, _ = _new_run(state, owner, pool, pages - 1, 1, columns, Tier.DEVICE, writer=owner)
            state = _copy(state)
            frozen = [r for r, _ in space(state, holder, pool)]
            state.run_writer[frozen] = NO_OWNER
    state, _ = _add_checkpoint(state, holder, spec, state_tier)
    return _settle(state), holder


def finish(state: PhysicalState, owner: OwnerId, spec: CheckpointSpec | None = None) -> PhysicalState:
    """Returns the state after Finish: frozen image becomes the endpoint, reservation is returned (A-5)."""
    _expect(state, owner, OwnerKind.ACTIVE)
    state = settle_fork(state, owner)
    frontier = tuple(int(t) for t in state.owner_frontier[owner])
    spec = spec or CheckpointSpec(max(frontier))
    spec = dataclasses.replace(spec, image=ImageId(int(state.owner_writes[owner])), kv_tokens=frontier)
    state = _copy(state)
    state.owner_kind[owner] = OwnerKind.PRIVATE
    state.owner_reads[owner] = state.owner_writes[owner] = NO_IMAGE
    state.owner_reserved_pages[owner] = 0
    state.owner_reserved_states[owner] = 0
    state.owner_lineage[owner] = NO_OWNER
    state.edges[owner] = False
    state.run_writer[state.run_writer == owner] = NO_OWNER
    state, _ = _add_checkpoint(state, owner, spec, Tier.DEVICE)
    return _settle(state)


# ---------------------------------------------------------------- degradations and releases


def evict(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state without this owner (active ones too: Discard); zero-reference objects go with it."""
    if state.owner_kind[owner] == OwnerKind.FREE:
        raise ValueError(f"owner row {owner} is free; stale handle?")
    state = settle_fork(state, owner)
    return _settle(_free_owner(state, owner))


def drop_checkpoint(state: PhysicalState, checkpoint: CheckpointId) -> PhysicalState:
    """Returns the state without this checkpoint; coverage that no other one needs is shortened (T-5)."""
    owner = OwnerId(int(state.checkpoint_owner[checkpoint]))
    if owner == NO_OWNER:
        raise ValueError(f"checkpoint row {checkpoint} is free")
    state = _free_checkpoint(state, checkpoint)
    if state.owner_kind[owner] != OwnerKind.ACTIVE and not len(checkpoints_of(state, owner)):
        state = _free_owner(state, owner)
    return _settle(_trim_space(state, owner))


def place_image(state: PhysicalState, image: ImageId, tier: Tier) -> PhysicalState:
    """Returns the state with the image in exactly `tier` (S-2 Snapshot/Restore, or dropping a duplicate)."""
    state = _copy(state)
    if tier & Tier.DEVICE and state.image_device[image] == NO_SLOT:
        state.image_device[image] = _free_slot(
            state.image_device[state.image_live], state.capacity.device_state_slots, "Device state slot"
        )
        state.image_device_epoch[image] = state.image_epoch[image]
    if tier & Tier.HOST and state.image_host[image] == NO_SLOT:
        state.image_host[image] = _free_slot(
            state.image_host[state.image_live], state.capacity.host_state_slots, "Host state slot"
        )
        state.image_host_epoch[image] = state.image_epoch[image]
    if not tier & Tier.DEVICE:
        state.image_device[image] = NO_SLOT
    if not tier & Tier.HOST:
        state.image_host[image] = NO_SLOT
    return _settle(state)


def place_run(state: PhysicalState, run: RunId, tier: Tier) -> PhysicalState:
    """Returns the state with every page of the run in exactly `tier`; a Host replica is one extent."""
    state = _place_run(state, run, tier)
    return _settle(state)


def demote(
    state: PhysicalState, owner: OwnerId, *, images: bool = True, kv_from_page: int | None = 0
) -> PhysicalState:
    """Returns the state with the owner's images and its pages from `kv_from_page` on moved to Host only.

    This is the plain operation on unshared data; what a shared page may do is decided jointly by targets.
    """
    if images:
        for checkpoint in checkpoints_of(state, owner):
            state = place_image(state, ImageId(int(state.checkpoint_image[checkpoint])), Tier.HOST)
    if kv_from_page is not None:
        for pool in range(state.capacity.num_pools):
            state = _split_at(state, owner, pool, kv_from_page)
            for run, start in space(state, owner, pool):
                if start >= kv_from_page:
                    state = _place_run(state, RunId(run), Tier.HOST)
    return _settle(state)


def set_edge(state: PhysicalState, active: OwnerId, owner: OwnerId, *, held: bool = True) -> PhysicalState:
    """Returns the state with (or without) the owner edge by which `active` protects `owner` (D-3)."""
    state = _copy(state)
    state.edges[active, owner] = held
    return _settle(state)


def set_pin(state: PhysicalState, owner: OwnerId, *, pins: int) -> PhysicalState:
    """Returns the state with `pins` open-transaction pins on an owner (T-2)."""
    state = _copy(state)
    state.owner_pins[owner] = pins
    return _settle(state)


def set_transaction(state: PhysicalState, *, is_open: bool) -> PhysicalState:
    """Returns the state with the one global transition open or closed; same revision (R-12)."""
    return dataclasses.replace(state, open_transaction=is_open)


# ---------------------------------------------------------------- rows


def _copy(state: PhysicalState) -> PhysicalState:
    """Returns a state whose arrays are fresh copies, so that this file may write into them."""
    arrays = {
        f.name: getattr(state, f.name).copy()
        for f in dataclasses.fields(state)
        if isinstance(getattr(state, f.name), np.ndarray)
    }
    return dataclasses.replace(state, **arrays)


def _settle(state: PhysicalState) -> PhysicalState:
    """Returns the garbage-collected state at the next revision, or raises if an axis is over capacity."""
    state = _collect(state)
    have, limit = used(state), state.capacity.units()
    if (have > limit).any():
        names = axis_names(state.capacity)
        over = ", ".join(f"{names[r]} {have[r]} > {limit[r]}" for r in np.flatnonzero(have > limit))
        raise ValueError(f"does not fit: {over}; release something first")
    return dataclasses.replace(state, revision=state.revision + 1)


def _expect(state: PhysicalState, owner: OwnerId, kind: OwnerKind) -> None:
    got = OwnerKind(int(state.owner_kind[owner]))
    if got != kind:
        raise ValueError(f"owner row {owner} is {got.name}, expected {kind.name}")


def _kv_tokens(spec: CheckpointSpec, pool: int) -> int:
    return spec.frontier_tokens if spec.kv_tokens is None else spec.kv_tokens[pool]


def _extend(state: PhysicalState, prefix: str, fills: dict[str, object]) -> PhysicalState:
    """Returns the state with one more row in every array named `prefix_*`."""
    grown = {}
    for f in dataclasses.fields(state):
        if f.name.startswith(prefix):
            old = getattr(state, f.name)
            row = np.full((1, *old.shape[1:]), fills.get(f.name, 0), old.dtype)
            grown[f.name] = np.concatenate([old, row])
    return dataclasses.replace(state, **grown)


def _new_owner(state: PhysicalState, kind: OwnerKind) -> tuple[PhysicalState, OwnerId]:
    free = np.flatnonzero(state.owner_kind == OwnerKind.FREE)
    if not len(free):
        fills = {"owner_reads": NO_IMAGE, "owner_writes": NO_IMAGE, "owner_lineage": NO_OWNER}
        state = _extend(state, "owner_", fills)
        o = state.num_owners
        edges = np.zeros((o, o), bool)
        edges[: o - 1, : o - 1] = state.edges
        state = dataclasses.replace(state, edges=edges)
        free = [o - 1]
    state = _copy(state)
    owner = OwnerId(int(free[0]))
    state.owner_kind[owner] = kind
    state.owner_generation[owner] += 1
    state.owner_frontier[owner] = 0
    return state, owner


def _free_slot(taken: np.ndarray, slots: int, what: str) -> int:
    free = np.setdiff1d(np.arange(slots), taken)
    if not len(free):
        raise ValueError(f"does not fit: no free {what} of {slots}; release something first")
    return int(free[0])


def _new_image(state: PhysicalState, tier: Tier) -> tuple[PhysicalState, ImageId]:
    free = np.flatnonzero(~state.image_live)
    if not len(free):
        state = _extend(state, "image_", {})
        free = [len(state.image_live) - 1]
    state = _copy(state)
    image = ImageId(int(free[0]))
    state.image_epoch[image] += 1
    device = host = NO_SLOT
    if tier & Tier.DEVICE:
        taken = state.image_device[state.image_live]
        device = _free_slot(taken, state.capacity.device_state_slots, "Device state slot")
    if tier & Tier.HOST:
        taken = state.image_host[state.image_live]
        host = _free_slot(taken, state.capacity.host_state_slots, "Host state slot")
    state.image_live[image] = True
    state.image_device[image], state.image_host[image] = device, host
    state.image_device_epoch[image] = state.image_host_epoch[image] = state.image_epoch[image]
    state.image_pins[image] = 0
    return state, image


def _new_run(
    state: PhysicalState,
    owner: OwnerId,
    pool: int,
    start: int,
    pages: int,
    columns: int,
    tier: Tier,
    writer: OwnerId | int = NO_OWNER,
) -> tuple[PhysicalState, RunId]:
    free = np.flatnonzero(state.run_pool == NO_POOL)
    if not len(free):
        state = _extend(state, "run_", {"run_pool": NO_POOL, "run_host_start": NO_EXTENT})
        free = [len(state.run_pool) - 1]
    state = _copy(state)
    run = RunId(int(free[0]))
    state.run_pool[run], state.run_pages[run] = pool, pages
    state.run_epoch[run] += 1
    state.run_device[run], state.run_host_start[run] = False, NO_EXTENT
    state.run_committed[run] = columns
    state.run_device_columns[run] = state.run_host_columns[run] = 0
    state.run_writer[run], state.run_pins[run] = writer, 0
    state = _add_entries(state, [(owner, run, start)])
    state = _place_run(state, run, tier)
    if columns != state.capacity.page_tokens and pages > 1:
        state = _split_at(state, owner, pool, start + pages - 1)
    return state, run


def _place_run(state: PhysicalState, run: RunId, tier: Tier) -> PhysicalState:
    state = _copy(state)
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


def _add_entries(state: PhysicalState, entries: Sequence[tuple[int, int, int]]) -> PhysicalState:
    rows = np.asarray(entries, np.int32).reshape(-1, 3)
    owner = np.concatenate([state.space_owner, rows[:, 0]])
    run = np.concatenate([state.space_run, rows[:, 1]])
    start = np.concatenate([state.space_start, rows[:, 2]])
    order = np.lexsort((start, state.run_pool[run], owner))
    return dataclasses.replace(
        state, space_owner=owner[order], space_run=run[order], space_start=start[order]
    )


def _split_at(state: PhysicalState, owner: OwnerId, pool: int, page: int) -> PhysicalState:
    """Returns the state in which a run boundary of this address space lies at `page`."""
    for run, start in space(state, owner, pool):
        if start < page < start + int(state.run_pages[run]):
            return split_run(state, RunId(run), page - start)
    return state


def split_run(state: PhysicalState, run: RunId, pages: int) -> PhysicalState:
    """Returns the state with the run cut after `pages` pages; nothing else changes."""
    total, page = int(state.run_pages[run]), state.capacity.page_tokens
    if not 0 < pages < total:
        raise ValueError(f"cannot cut a run of {total} pages after {pages}")
    free = np.flatnonzero(state.run_pool == NO_POOL)
    if not len(free):
        state = _extend(state, "run_", {"run_pool": NO_POOL, "run_host_start": NO_EXTENT})
        free = [len(state.run_pool) - 1]
    state = _copy(state)
    new = int(free[0])
    for f in dataclasses.fields(state):
        if f.name.startswith("run_"):
            array = getattr(state, f.name)
            array[new] = array[run]
    state.run_pages[run], state.run_pages[new] = pages, total - pages
    state.run_committed[run] = page
    if state.run_device[run]:
        state.run_device_columns[run] = page
    if state.run_host_start[run] != NO_EXTENT:
        state.run_host_columns[run] = page
        granules = int(state.capacity.page_granules()[state.run_pool[run]])
        state.run_host_start[new] = state.run_host_start[run] + pages * granules
    holders = np.flatnonzero(state.space_run == run)
    entries = [(int(state.space_owner[e]), new, int(state.space_start[e]) + pages) for e in holders]
    return _add_entries(state, entries)


def _merge_writer_runs(state: PhysicalState, owner: OwnerId, pool: int) -> PhysicalState:
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
        if not same or middle in cuts:
            i += 1
            continue
        state = _copy(state)
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


def _refer(state: PhysicalState, owner: OwnerId, source: OwnerId, pool: int, pages: int) -> PhysicalState:
    """Returns the state in which `owner` also refers to the source's first `pages` pages."""
    state = _split_at(state, source, pool, pages)
    rows = [(run, start) for run, start in space(state, source, pool) if start < pages]
    covered = rows[-1][1] + int(state.run_pages[rows[-1][0]]) if rows else 0
    if covered < pages:
        raise ValueError(f"owner row {source} has {covered} pages of pool {pool}, cannot share {pages}")
    return _add_entries(state, [(owner, run, start) for run, start in rows])


def _add_checkpoint(
    state: PhysicalState, owner: OwnerId, spec: CheckpointSpec, tier: Tier
) -> tuple[PhysicalState, CheckpointId]:
    page, pools = state.capacity.page_tokens, state.capacity.num_pools
    image = spec.image
    if image is None:
        state, image = _new_image(state, tier)
    free = np.flatnonzero(state.checkpoint_owner == NO_OWNER)
    if not len(free):
        state = _extend(state, "checkpoint_", {"checkpoint_owner": NO_OWNER, "checkpoint_image": NO_IMAGE})
        free = [len(state.checkpoint_owner) - 1]
    kv = [_kv_tokens(spec, pool) for pool in range(pools)]
    state = _copy(state)
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
            state = _split_at(state, owner, pool, cut)
    return state, row


def _free_checkpoint(state: PhysicalState, checkpoint: int) -> PhysicalState:
    state = _copy(state)
    state.checkpoint_owner[checkpoint] = NO_OWNER
    state.checkpoint_image[checkpoint] = NO_IMAGE
    return state


def _free_owner(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    state = _copy(state)
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


def _cut_space(state: PhysicalState, owner: OwnerId, pool: int, pages: int) -> PhysicalState:
    """Returns the state in which the owner's address space of `pool` ends at `pages` (a run boundary)."""
    mine = (state.space_owner == owner) & (state.run_pool[state.space_run] == pool)
    keep = ~(mine & (state.space_start >= pages))
    return dataclasses.replace(
        state,
        space_owner=state.space_owner[keep],
        space_run=state.space_run[keep],
        space_start=state.space_start[keep],
    )


def _trim_space(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state with an inactive owner's address space as long as its deepest checkpoint needs."""
    if state.owner_kind[owner] not in (OwnerKind.PRIVATE, OwnerKind.SHARED):
        return state
    state = _copy(state)
    rows = checkpoints_of(state, owner)
    state.owner_frontier[owner] = state.checkpoint_kv_tokens[rows].max(0)
    for pool in range(state.capacity.num_pools):
        pages = ceil_div(int(state.owner_frontier[owner, pool]), state.capacity.page_tokens)
        state = _cut_space(_split_at(state, owner, pool, pages), owner, pool, pages)
    return state


def _collect(state: PhysicalState) -> PhysicalState:
    """Returns the state without zero-reference objects (T-2); pinned ones stay."""
    state = _copy(state)
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
