"""What is true after each stage of a chosen target: the states S0..Sn of one transition (R-10, X-4, X-5).

Owns: the stages as functions from state to state, and the copies that each of them needs. Chooses nothing
and copies nothing: the program runs the copies between two stages, and `apply` runs all stages at once, for
proofs and for research code.

    begin      S0, partial runs cut so that every change is about whole rows
    released   evictions, dropped checkpoints and redundant replicas are gone
    prepared   Host destinations are taken; nothing serves from them yet
    published  Host replicas serve, the Device replicas that they replace are gone
    restored   the source's pages and image are on Device
    activated  the sequence exists with its whole reservation; a consumed source is gone

Other active sequences may go on between two stages, within their reservations: no stage touches their rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ninfer_jax.planner.capacity import ceil_div
from ninfer_jax.planner.extents import Blocked, release, take_intervals
from ninfer_jax.planner.ids import NO_EXTENT, NO_IMAGE, NO_OWNER, NO_SLOT, OwnerId, OwnerKind, RunId, Tier
from ninfer_jax.planner.needs import growth_pages
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.resolution import Piece, Resolution, When, place_recipe, resolve
from ninfer_jax.planner.rows import (
    collected,
    copied,
    cut_space,
    free_checkpoint,
    free_owner,
    free_slot,
    name_pages,
    new_image,
    new_owner,
    new_run,
    put_run,
    settled,
    split_run,
    trim_space,
    with_entries,
)
from ninfer_jax.planner.state import PhysicalState, checkpoints_of, space
from ninfer_jax.planner.target import TargetBatch


class PageCopy(NamedTuple):
    """Neighbouring pages that cross between the tiers; which way, the stage says."""

    pool: int
    serial: int  # of the first page on Device
    pages: int
    host_start: int  # granule of the first page on Host


@dataclass(frozen=True)
class Copies:
    """What one stage moves between the tiers."""

    images: tuple[tuple[int, int], ...]  # (slot it is in, slot it goes to)
    pages: tuple[PageCopy, ...]


class TailCopy(NamedTuple):
    """The partial tail page that a sequence gets a copy of (partial-tail COW)."""

    pool: int
    source_serial: int
    host_start: int  # granule to copy from, or NO_EXTENT: the source is on Device
    serial: int


@dataclass(frozen=True)
class Activation:
    """How the new sequence is bound (S-2, S-4)."""

    owner: OwnerId
    read_slot: int | None  # Device slot of the state it starts from; None is root
    write_slot: int
    image_from_host: int | None  # Host slot whose image must first be copied into `write_slot`
    tails: tuple[TailCopy, ...]


@dataclass(frozen=True, eq=False)
class Transition:
    """One target on its way; made by `begin`."""

    problem: Problem
    resolution: Resolution
    pieces: tuple[Piece, ...]  # by whole rows
    starts: dict[int, int]  # granule of each piece's Host destination, by its index
    images: int  # object ids below are image rows, the others run rows

    @property
    def has_copies_out(self) -> bool:
        """Whether anything goes to Host."""
        return any(p.copies_d2h for p in self.pieces)

    @property
    def has_copies_in(self) -> bool:
        """Whether anything comes from Host."""
        return any(p.restores_h2d for p in self.pieces)

    def released(self, state: PhysicalState) -> PhysicalState:
        """Returns the state after HostReleases."""
        state = _free(copied(state), self.pieces, self.images, When.NOW)
        return collected(_degrade(state, self.resolution))

    def prepared(self, state: PhysicalState) -> tuple[PhysicalState, Copies]:
        """Returns the state after CopyPreparation, and what must arrive before `published`."""
        state = copied(state)
        images: list[tuple[int, int]] = []
        pages: list[PageCopy] = []
        taken: list[tuple[int, int]] = []
        granules = state.capacity.page_granules()
        for i, p in enumerate(self.pieces):
            if not p.copies_d2h:
                continue
            if p.item == 0:
                slots = state.image_host[state.image_live]
                slot = free_slot(slots, state.capacity.host_state_slots, "Host state slot")
                state.image_host[p.obj], state.image_host_epoch[p.obj] = slot, state.image_epoch[p.obj]
                images.append((int(state.image_device[p.obj]), slot))
                continue
            run, start = p.obj - self.images, self.starts[i]
            state.run_host_start[run], state.run_host_epoch[run] = start, state.run_epoch[run]
            state.run_host_columns[run] = state.run_committed[run]
            taken.append((start, p.size * int(granules[p.item - 1])))
            pages.append(PageCopy(p.item - 1, int(state.run_serial[run]), p.size, start))
        return replace(state, arena=take_intervals(state.arena, taken)), Copies(tuple(images), tuple(pages))

    def published(self, state: PhysicalState) -> PhysicalState:
        """Returns the state after CopyPublication."""
        return _free(copied(state), self.pieces, self.images, When.COPIED)

    def restored(self, state: PhysicalState) -> tuple[PhysicalState, Copies]:
        """Returns the state after Restore, and what must arrive on Device before `activated`."""
        state = copied(state)
        images: list[tuple[int, int]] = []
        pages: list[PageCopy] = []
        for p in self.pieces:
            if not p.restores_h2d:
                continue
            if p.item == 0:
                slots = state.image_device[state.image_live]
                slot = free_slot(slots, state.capacity.device_state_slots, "Device state slot")
                state.image_device[p.obj], state.image_device_epoch[p.obj] = slot, state.image_epoch[p.obj]
                images.append((int(state.image_host[p.obj]), slot))
                continue
            run = p.obj - self.images
            start, serial = int(state.run_host_start[run]), int(state.run_serial[run])
            pages.append(PageCopy(p.item - 1, serial, p.size, start))
            state = put_run(state, RunId(run), Tier.BOTH)
        return copied(state), Copies(tuple(images), tuple(pages))

    def activated(self, state: PhysicalState) -> tuple[PhysicalState, Activation]:
        """Returns the state after Committed, and how the new sequence is bound."""
        state, activation = _activate(self.problem, state, self.resolution)
        return collected(_free(copied(state), self.pieces, self.images, When.LATE)), activation


def begin(problem: Problem, target: TargetBatch) -> tuple[Transition, PhysicalState]:
    """Returns the transition of one target, and its first state.

    Raises:
        ValueError: if the target does not fit at some stage; assess or seal first.
    """
    assessment = assess_numpy(problem, target)
    if not bool(assessment.fits[0]):
        raise ValueError(f"target is {assessment.residual[0].tolist()} units over capacity at its peak")
    resolution = resolve(problem, target)
    recipe, placed = place_recipe(problem, resolution)
    if isinstance(placed, Blocked):
        raise ValueError(f"the Host arena has no hole for extent {placed.index}: {placed}")
    index = {id(p): i for i, p in enumerate(resolution.pieces)}
    starts = {index[id(p)]: s for p, s in zip(recipe.pieces, placed.starts, strict=True)}
    state, images, pieces = problem.state, len(problem.state.image_live), []
    for p in resolution.pieces:
        if p.item > 0 and p.first > 0:
            state, new = split_run(state, RunId(p.obj - images), p.first)
            p = p._replace(obj=new + images, first=0, last=p.size)
        pieces.append(p)
    return Transition(problem, resolution, tuple(pieces), starts, images), state


def degraded(problem: Problem, target: TargetBatch) -> PhysicalState:
    """Returns the state after the target's pressure alone, before anything is restored or activated."""
    transition, state = begin(problem, target)
    state, _ = transition.prepared(transition.released(state))
    return settled(transition.published(state))


def apply(problem: Problem, target: TargetBatch) -> tuple[PhysicalState, OwnerId]:
    """Returns the stable state after the target was committed, and the row of the new active sequence.

    Raises:
        ValueError: if the target does not fit at some stage; assess or seal first.
    """
    transition, state = begin(problem, target)
    state, _ = transition.prepared(transition.released(state))
    state, _ = transition.restored(transition.published(state))
    state, activation = transition.activated(state)
    return settled(state), activation.owner


def _free(state: PhysicalState, pieces: tuple[Piece, ...], images: int, when: When) -> PhysicalState:
    """Frees, in a state whose arrays are fresh, what is due."""
    arena = state.arena
    granules = state.capacity.page_granules()
    for p in pieces:
        if p.item == 0:
            if p.frees_device == when:
                state.image_device[p.obj] = NO_SLOT
            if p.frees_host == when:
                state.image_host[p.obj] = NO_SLOT
            continue
        run = p.obj - images
        if p.frees_device == when:
            state.run_device[run], state.run_device_columns[run] = False, 0
        if p.frees_host == when and state.run_host_start[run] != NO_EXTENT:
            length = p.size * int(granules[p.item - 1])
            arena = release(arena, [(int(state.run_host_start[run]), length)])
            state.run_host_start[run], state.run_host_columns[run] = NO_EXTENT, 0
    return replace(state, arena=arena)


def _degrade(state: PhysicalState, resolution: Resolution) -> PhysicalState:
    for c in resolution.dropped:
        owner = OwnerId(int(state.checkpoint_owner[c]))
        if owner not in resolution.evicted:
            state = trim_space(free_checkpoint(state, c), owner)
    for evicted in resolution.evicted:
        state = free_owner(state, OwnerId(evicted))
    return state


def _activate(
    problem: Problem, state: PhysicalState, resolution: Resolution
) -> tuple[PhysicalState, Activation]:
    """Returns the state with the new active sequence bound to its pages, image and reservation (A-1)."""
    which = resolution.candidate
    source, candidate = problem.source(which), problem.candidates[which]
    images, page = len(problem.state.image_live), state.capacity.page_tokens
    state, owner = new_owner(state, OwnerKind.ACTIVE)
    ends = [ceil_div(tokens, page) for tokens in candidate.request.capacity_tokens]
    state = name_pages(state, owner, ends)
    base = None
    if candidate.checkpoint is not None:
        base = problem.state.checkpoint_kv_tokens[candidate.checkpoint]
    state.owner_reserved_pages[owner] = growth_pages(state.capacity, candidate, base)
    if base is None:
        state, image = new_image(state, Tier.DEVICE)
        state.owner_reads[owner] = state.owner_writes[owner] = image
        return state, Activation(owner, None, int(state.image_device[image]), None, ())
    state.owner_frontier[owner] = base
    copied_tails: list[TailCopy] = []
    tails = {pool: (obj, from_host) for pool, obj, from_host in resolution.tail_copies}
    for pool in range(state.capacity.num_pools):
        pages = int(base[pool]) // page
        rows = [(r, s) for r, s in space(state, OwnerId(source.owner), pool) if s < pages]
        state = with_entries(state, [(owner, r, s) for r, s in rows])
        columns = int(base[pool]) % page
        if pool in tails:
            obj, from_host = tails[pool]
            run = obj - images
            start = int(state.run_host_start[run]) if from_host else NO_EXTENT
            serial = int(state.owner_serial[owner, pool]) + pages
            copied_tails.append(TailCopy(pool, int(state.run_serial[run]), start, serial))
            state, _ = new_run(state, owner, pool, pages, 1, columns, Tier.DEVICE, writer=owner)
        elif columns:
            run = resolution.tail_in_place[pool] - images
            state = copied(with_entries(state, [(owner, run, pages)]))
            # what lay behind the base belonged to released checkpoints and will be overwritten
            state.run_epoch[run] += 1
            state.run_device_epoch[run] = state.run_epoch[run]
            state.run_committed[run] = state.run_device_columns[run] = columns
            state.run_writer[run] = owner
    from_host_slot: int | None = None
    if resolution.forks:
        state, image = new_image(state, Tier.DEVICE)
        borrowed = state.image_device[source.image_obj] != NO_SLOT
        state.owner_writes[owner] = image
        state.owner_reads[owner] = source.image_obj if borrowed else image
        state.image_pins[source.image_obj] += int(borrowed)
        if not borrowed:
            from_host_slot = int(state.image_host[source.image_obj])
    else:
        state.owner_reads[owner] = state.owner_writes[owner] = source.image_obj
        state.image_host[source.image_obj] = NO_SLOT
        state.image_epoch[source.image_obj] += 1
        state.image_device_epoch[source.image_obj] = state.image_epoch[source.image_obj]
    read = int(state.image_device[state.owner_reads[owner]])
    write = int(state.image_device[state.owner_writes[owner]])
    activation = Activation(owner, read, write, from_host_slot, tuple(copied_tails))
    if not source.consume:
        state.edges[owner, source.owner] = True
        return state, activation
    return _hand_over(state, resolution, owner, OwnerId(source.owner)), activation


def _hand_over(
    state: PhysicalState, resolution: Resolution, owner: OwnerId, source: OwnerId
) -> PhysicalState:
    """Returns the state in which the consumed source's surviving checkpoints belong to the new lineage."""
    state = copied(state)
    for c in resolution.released:
        state.checkpoint_owner[c], state.checkpoint_image[c] = NO_OWNER, NO_IMAGE
    state.checkpoint_owner[checkpoints_of(state, source)] = owner
    for pool in range(state.capacity.num_pools):
        state = cut_space(state, source, pool, 0)
    state = copied(free_owner(state, source))
    state.owner_lineage[owner] = source
    return state
