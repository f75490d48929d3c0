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

from ninfer_jax.planner.capacity import ceil_div
from ninfer_jax.planner.ids import (
    NO_IMAGE,
    NO_OWNER,
    NO_SLOT,
    CheckpointId,
    ImageId,
    OwnerId,
    OwnerKind,
    RunId,
    Tier,
)
from ninfer_jax.planner.rows import (
    CheckpointSpec,
    collected,
    copied,
    cut_space,
    expect_kind,
    free_checkpoint,
    free_owner,
    free_slot,
    kv_tokens_of,
    merge_writer_runs,
    name_pages,
    new_checkpoint,
    new_image,
    new_owner,
    new_run,
    new_serials,
    put_run,
    refer,
    settled,
    split_at,
    trim_space,
)
from ninfer_jax.planner.state import PhysicalState, checkpoints_of, space

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
    >>> from ninfer_jax.planner.state import make_state, used
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
    state, owner = new_owner(state, kind)
    shares = [share_tokens] * pools if isinstance(share_tokens, int) else list(share_tokens)
    for pool in range(pools):
        total = max(kv_tokens_of(spec, pool) for spec in checkpoints)
        shared_pages = 0
        if share_with is not None and shares[pool]:
            if shares[pool] > total:
                raise ValueError(f"cannot share {shares[pool]} tokens of an owner with only {total}")
            if share_tail and shares[pool] % page and shares[pool] != total:
                raise ValueError(
                    f"a partial tail page shared at {shares[pool]} tokens must be the end, not {total}"
                )
            shared_pages = ceil_div(shares[pool], page) if share_tail else shares[pool] // page
            state = refer(state, owner, share_with, pool, shared_pages)
        rest = ceil_div(total, page) - shared_pages
        if rest > 0:
            columns = total - (ceil_div(total, page) - 1) * page
            state, _ = new_run(state, owner, pool, shared_pages, rest, columns, kv_tier)
    for spec in checkpoints:
        state, _ = new_checkpoint(state, owner, spec, state_tier)
    return settled(state), owner


def activate_root(
    state: PhysicalState, capacity_tokens: int | Sequence[int]
) -> tuple[PhysicalState, OwnerId]:
    """Returns the state with a new active sequence that starts from root, image and reservation (A-1)."""
    pools, page = state.capacity.num_pools, state.capacity.page_tokens
    tokens = [capacity_tokens] * pools if isinstance(capacity_tokens, int) else list(capacity_tokens)
    state, owner = new_owner(state, OwnerKind.ACTIVE)
    state, image = new_image(state, Tier.DEVICE)
    state = copied(state)
    state.owner_reads[owner] = state.owner_writes[owner] = image
    pages = [ceil_div(t, page) for t in tokens]
    state.owner_reserved_pages[owner] = pages
    return settled(name_pages(state, owner, pages)), owner


# ---------------------------------------------------------------- active sequences


def advance(state: PhysicalState, owner: OwnerId, frontier: int | Sequence[int]) -> PhysicalState:
    """Returns the state after the active sequence committed tokens up to `frontier`; same revision (R-11).

    Pages are converted from the reservation one for one, so `used` does not change.

    Raises:
        ValueError: if a frontier goes backwards or beyond the reservation (A-4).
    """
    expect_kind(state, owner, OwnerKind.ACTIVE)
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
        state = copied(state)
        if have % page:
            tail = rows[-1][0]
            filled = columns if extra <= 0 else page
            state.run_committed[tail] = state.run_device_columns[tail] = filled
        if extra > 0:
            state.owner_reserved_pages[owner, pool] -= extra
            state, _ = new_run(state, owner, pool, mapped, extra, columns, Tier.DEVICE, writer=owner)
            if columns != page and extra > 1:
                state = split_at(state, owner, pool, mapped + extra - 1)
            state = merge_writer_runs(state, owner, pool)
        state = copied(state)
        state.owner_frontier[owner, pool] = want
    return state


def truncate(state: PhysicalState, owner: OwnerId, frontier: int | Sequence[int]) -> PhysicalState:
    """Returns the state after a rollback: unmapped pages return to the reservation (A-2)."""
    expect_kind(state, owner, OwnerKind.ACTIVE)
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
            state = split_at(state, owner, pool, keep)
            state = cut_space(state, owner, pool, keep)
            state = copied(state)
            state.owner_reserved_pages[owner, pool] += mapped - keep
        if goal[pool] % page and goal[pool] < int(state.owner_frontier[owner, pool]):
            state = split_at(state, owner, pool, keep - 1)
            run = space(state, owner, pool)[-1][0]
            state = copied(state)
            state.run_committed[run] = state.run_device_columns[run] = goal[pool] - (keep - 1) * page
        state = copied(state)
        state.owner_frontier[owner, pool] = goal[pool]
    return collected(state)


def settle_fork(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state after the sequence's first state-writing commit: it reads what it writes (S-3)."""
    if state.owner_reads[owner] == state.owner_writes[owner]:
        return state
    state = copied(state)
    state.image_pins[state.owner_reads[owner]] -= 1
    state.owner_reads[owner] = state.owner_writes[owner]
    return collected(state)


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
    expect_kind(state, owner, OwnerKind.ACTIVE)
    page = state.capacity.page_tokens
    frontier = tuple(int(t) for t in state.owner_frontier[owner])
    if spec.kv_tokens is None:
        spec = dataclasses.replace(spec, kv_tokens=frontier)
    if spec.kv_tokens != frontier:
        raise ValueError(f"captures are taken at the frontier {frontier}, got {spec.kv_tokens}")
    holder = owner
    if shared:
        state, holder = new_owner(state, OwnerKind.SHARED)
        for pool, tokens in enumerate(frontier):
            pages = ceil_div(tokens, page)
            state = refer(state, holder, owner, pool, pages)
            if tokens % page:
                state = split_at(state, owner, pool, pages - 1)
                tail = space(state, owner, pool)[-1][0]
                state = cut_space(state, owner, pool, pages - 1)
                columns = int(state.run_committed[tail])
                state = copied(state)
                state.run_writer[tail] = NO_OWNER
                total = pages + int(state.owner_reserved_pages[owner, pool])
                state, state.owner_serial[owner, pool] = new_serials(state, total)  # the page has two now
                state, _ = new_run(state, owner, pool, pages - 1, 1, columns, Tier.DEVICE, writer=owner)
            state = copied(state)
            frozen = [r for r, _ in space(state, holder, pool)]
            state.run_writer[frozen] = NO_OWNER
    state, _ = new_checkpoint(state, holder, spec, state_tier)
    return settled(state), holder


def finish(state: PhysicalState, owner: OwnerId, spec: CheckpointSpec | None = None) -> PhysicalState:
    """Returns the state after Finish: frozen image becomes the endpoint, reservation is returned (A-5)."""
    expect_kind(state, owner, OwnerKind.ACTIVE)
    state = settle_fork(state, owner)
    frontier = tuple(int(t) for t in state.owner_frontier[owner])
    spec = spec or CheckpointSpec(max(frontier))
    spec = dataclasses.replace(spec, image=ImageId(int(state.owner_writes[owner])), kv_tokens=frontier)
    state = copied(state)
    state.owner_kind[owner] = OwnerKind.PRIVATE
    state.owner_reads[owner] = state.owner_writes[owner] = NO_IMAGE
    state.owner_reserved_pages[owner] = 0
    state.owner_reserved_states[owner] = 0
    state.owner_lineage[owner] = NO_OWNER
    state.edges[owner] = False
    state.run_writer[state.run_writer == owner] = NO_OWNER
    state, _ = new_checkpoint(state, owner, spec, Tier.DEVICE)
    return settled(state)


# ---------------------------------------------------------------- degradations and releases


def evict(state: PhysicalState, owner: OwnerId) -> PhysicalState:
    """Returns the state without this owner (active ones too: Discard); zero-reference objects go with it."""
    if state.owner_kind[owner] == OwnerKind.FREE:
        raise ValueError(f"owner row {owner} is free; stale handle?")
    state = settle_fork(state, owner)
    return settled(free_owner(state, owner))


def drop_checkpoint(state: PhysicalState, checkpoint: CheckpointId) -> PhysicalState:
    """Returns the state without this checkpoint; coverage that no other one needs is shortened (T-5)."""
    owner = OwnerId(int(state.checkpoint_owner[checkpoint]))
    if owner == NO_OWNER:
        raise ValueError(f"checkpoint row {checkpoint} is free")
    state = free_checkpoint(state, checkpoint)
    if state.owner_kind[owner] != OwnerKind.ACTIVE and not len(checkpoints_of(state, owner)):
        state = free_owner(state, owner)
    return settled(trim_space(state, owner))


def place_image(state: PhysicalState, image: ImageId, tier: Tier) -> PhysicalState:
    """Returns the state with the image in exactly `tier` (S-2 Snapshot/Restore, or dropping a duplicate)."""
    state = copied(state)
    if tier & Tier.DEVICE and state.image_device[image] == NO_SLOT:
        state.image_device[image] = free_slot(
            state.image_device[state.image_live], state.capacity.device_state_slots, "Device state slot"
        )
        state.image_device_epoch[image] = state.image_epoch[image]
    if tier & Tier.HOST and state.image_host[image] == NO_SLOT:
        state.image_host[image] = free_slot(
            state.image_host[state.image_live], state.capacity.host_state_slots, "Host state slot"
        )
        state.image_host_epoch[image] = state.image_epoch[image]
    if not tier & Tier.DEVICE:
        state.image_device[image] = NO_SLOT
    if not tier & Tier.HOST:
        state.image_host[image] = NO_SLOT
    return settled(state)


def place_run(state: PhysicalState, run: RunId, tier: Tier) -> PhysicalState:
    """Returns the state with every page of the run in exactly `tier`; a Host replica is one extent."""
    state = put_run(state, run, tier)
    return settled(state)


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
            state = split_at(state, owner, pool, kv_from_page)
            for run, start in space(state, owner, pool):
                if start >= kv_from_page:
                    state = put_run(state, RunId(run), Tier.HOST)
    return settled(state)


def set_edge(state: PhysicalState, active: OwnerId, owner: OwnerId, *, held: bool = True) -> PhysicalState:
    """Returns the state with (or without) the owner edge by which `active` protects `owner` (D-3)."""
    state = copied(state)
    state.edges[active, owner] = held
    return settled(state)


def set_pin(state: PhysicalState, owner: OwnerId, *, pins: int) -> PhysicalState:
    """Returns the state with `pins` open-transaction pins on an owner (T-2)."""
    state = copied(state)
    state.owner_pins[owner] = pins
    return settled(state)


def set_transaction(state: PhysicalState, *, is_open: bool) -> PhysicalState:
    """Returns the state with the one global transition open or closed; same revision (R-12)."""
    return dataclasses.replace(state, open_transaction=is_open)
