"""check_invariants: everything that must hold of a stable state, recomputed from scratch.

Owns: the checks (R-5, R-7, K-3, K-4, K-6, C-5 and the row rules of `state`). Changes nothing. It walks
single pages and Python sets on purpose: it must not share code with what it checks.
"""

from __future__ import annotations

from ninfer_jax.planner.capacity import axis_names
from ninfer_jax.planner.ids import NO_EXTENT, NO_IMAGE, NO_OWNER, NO_POOL, NO_SLOT, OwnerId, OwnerKind
from ninfer_jax.planner.state import PhysicalState, checkpoints_of, is_valid, space, used


def check_invariants(state: PhysicalState) -> None:
    """Returns None if the state is legal.

    Raises:
        ValueError: naming the rule and the two facts that disagree.
    """
    _check_owners(state)
    _check_images(state)
    _check_runs(state)
    _check_spaces(state)
    _check_capacity(state)
    for checkpoint in range(len(state.checkpoint_owner)):
        if state.checkpoint_owner[checkpoint] != NO_OWNER and not is_valid(state, checkpoint):
            raise ValueError(f"C-5: checkpoint row {checkpoint} has lost its image or its KV coverage")


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_owners(state: PhysicalState) -> None:
    for o in range(state.num_owners):
        kind = OwnerKind(int(state.owner_kind[o]))
        rows = checkpoints_of(state, OwnerId(o))
        _need(
            kind != OwnerKind.FREE or not len(rows), f"owner row {o} is free but has {len(rows)} checkpoints"
        )
        if kind == OwnerKind.ACTIVE:
            _need(state.owner_writes[o] != NO_IMAGE, f"S-2: active owner {o} has no image to write")
        else:
            _need(
                state.owner_writes[o] == NO_IMAGE and state.owner_reads[o] == NO_IMAGE,
                f"inactive owner {o} is bound to an image",
            )
            _need(
                not state.owner_reserved_pages[o].any() and not state.owner_reserved_states[o],
                f"A-1: inactive owner {o} holds a reservation",
            )
            _need(not state.edges[o].any(), f"D-3: inactive owner {o} holds an edge")
        if kind in (OwnerKind.PRIVATE, OwnerKind.SHARED):
            _need(len(rows) > 0, f"C-2: inactive owner {o} has no checkpoint")
    refs = [
        (int(state.checkpoint_owner[c]), int(state.checkpoint_kind[c]), int(state.checkpoint_ordinal[c]))
        for c in range(len(state.checkpoint_owner))
        if state.checkpoint_owner[c] != NO_OWNER
    ]
    _need(len(refs) == len(set(refs)), f"X-8: two checkpoints of one owner share kind and ordinal: {refs}")


def _check_images(state: PhysicalState) -> None:
    live = [s for s in range(len(state.image_live)) if state.image_live[s]]
    for name, slots, epochs, limit in (
        ("Device", state.image_device, state.image_device_epoch, state.capacity.device_state_slots),
        ("Host", state.image_host, state.image_host_epoch, state.capacity.host_state_slots),
    ):
        taken = [int(slots[s]) for s in live if slots[s] != NO_SLOT]
        _need(len(taken) == len(set(taken)), f"R-5: two images share a {name} slot: {taken}")
        _need(all(0 <= t < limit for t in taken), f"{name} slot outside 0..{limit - 1}: {taken}")
        for s in live:
            if slots[s] != NO_SLOT:
                _need(epochs[s] == state.image_epoch[s], f"C-5: stale {name} replica of image {s}")
    writers = [int(w) for w in state.owner_writes if w != NO_IMAGE]
    _need(len(writers) == len(set(writers)), f"S-2: one image has two writers: {writers}")
    held = {int(i) for i in state.checkpoint_image if i != NO_IMAGE}
    _need(not held & set(writers), f"C-4: checkpoint images {held & set(writers)} are being written")
    for o in range(state.num_owners):
        read, write = int(state.owner_reads[o]), int(state.owner_writes[o])
        if read not in (NO_IMAGE, write):
            _need(state.image_pins[read] > 0, f"S-3: borrowed image {read} of owner {o} is not pinned")
    for s in range(len(state.image_live)):
        used_by = s in held or s in writers or s in {int(r) for r in state.owner_reads}
        if not state.image_live[s]:
            _need(not used_by, f"image row {s} is free but referenced")
        else:
            _need(used_by or state.image_pins[s] > 0, f"T-2: image {s} has no reference")
            _need(
                state.image_device[s] != NO_SLOT or state.image_host[s] != NO_SLOT,
                f"K-6: image {s} has no replica",
            )


def _check_runs(state: PhysicalState) -> None:
    page = state.capacity.page_tokens
    granules = state.capacity.page_granules()
    taken: set[int] = set()
    named: set[int] = set()
    for r in range(len(state.run_pool)):
        pool = int(state.run_pool[r])
        holders = [int(o) for o, run in zip(state.space_owner, state.space_run, strict=True) if run == r]
        if pool == NO_POOL:
            _need(not holders, f"run row {r} is free but referenced by owners {holders}")
            continue
        pages, committed = int(state.run_pages[r]), int(state.run_committed[r])
        _need(bool(holders) or state.run_pins[r] > 0, f"T-2: run {r} has no reference")
        _need(len(holders) == len(set(holders)), f"run {r} appears twice in one address space: {holders}")
        names = set(range(int(state.run_serial[r]), int(state.run_serial[r]) + pages))
        _need(not names & named, f"K-3: run {r} repeats page serials {sorted(names & named)[:3]}")
        _need(max(names) < state.next_serial, f"K-3: run {r} has serials not given out: {max(names)}")
        named |= names
        _need(pages > 0 and 0 < committed <= page, f"run {r}: {pages} pages, {committed} columns")
        _need(pages == 1 or committed == page, f"K-2: run {r} of {pages} pages has a partly filled page")
        _need(
            bool(state.run_device[r]) or state.run_host_start[r] != NO_EXTENT, f"K-6: run {r} has no replica"
        )
        if state.run_device[r]:
            _need(state.run_device_epoch[r] == state.run_epoch[r], f"K-3: stale Device replica of run {r}")
        if state.run_host_start[r] != NO_EXTENT:
            _need(state.run_host_epoch[r] == state.run_epoch[r], f"K-3: stale Host replica of run {r}")
            start = int(state.run_host_start[r])
            extent = set(range(start, start + pages * int(granules[pool])))
            _need(not extent & taken, f"K-7: run {r} overlaps another extent at {sorted(extent & taken)[:3]}")
            taken |= extent
        dormant = [o for o in holders if state.owner_kind[o] != OwnerKind.ACTIVE]
        if state.run_host_start[r] != NO_EXTENT and not dormant and not state.run_pins[r]:
            raise ValueError(f"run {r} is held by active owners {holders} only, but has a Host replica")
        writer = int(state.run_writer[r])
        if writer != NO_OWNER:
            _need(holders == [writer], f"K-4: run {r} is written by {writer} but held by {holders}")
    free = {g for start, length in state.arena.free for g in range(start, start + length)}
    _need(not free & taken, f"K-7: granules {sorted(free & taken)[:3]} are free and used")
    _need(len(free | taken) == state.arena.size, "K-7: granules are neither free nor used")


def _check_spaces(state: PhysicalState) -> None:
    page = state.capacity.page_tokens
    for o in range(state.num_owners):
        for pool in range(state.capacity.num_pools):
            rows = space(state, OwnerId(o), pool)
            at = 0
            bounds = {0}
            for run, start in rows:
                _need(start == at, f"K-1: owner {o} pool {pool}: page {at} is missing before run {run}")
                at += int(state.run_pages[run])
                bounds.add(at)
            for c in checkpoints_of(state, OwnerId(o)):
                tokens = int(state.checkpoint_kv_tokens[c, pool])
                for cut in {tokens // page, -(-tokens // page)}:
                    _need(
                        cut in bounds,
                        f"owner {o} pool {pool}: no run boundary at page {cut} of checkpoint {c}",
                    )
            mine = int(state.owner_kind[o]) == OwnerKind.ACTIVE
            frontier = int(state.owner_frontier[o, pool])
            _need(-(-frontier // page) == at, f"owner {o} pool {pool}: {at} pages for frontier {frontier}")
            for run, _ in rows:
                if mine:
                    _need(bool(state.run_device[run]), f"P-3: active owner {o} has run {run} off Device")


def _check_capacity(state: PhysicalState) -> None:
    have, limit = used(state), state.capacity.units()
    names = axis_names(state.capacity)
    for r, name in enumerate(names):
        _need(0 <= have[r] <= limit[r], f"R-7: {name} uses {have[r]} of {limit[r]}")
