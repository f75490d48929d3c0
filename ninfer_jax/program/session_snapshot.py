"""Owns what one inactive context is apart from where it lies: tokens, checkpoints, images and pages (C-11).

Reading changes nothing. Placing is a pure step from state to state: pages go to Device, or else to Host; the
endpoint must find a place for its image, any other checkpoint is dropped, with the reason, where none is
left. It owns no file and no catalog; `resources` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_jax.identity import PromptIdentity
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, HOST_STATE, ceil_div
from ninfer_jax.planner.extents import allocate
from ninfer_jax.planner.ids import NO_OWNER, NO_SLOT, CheckpointKind, ImageId, OwnerId, OwnerKind, Tier
from ninfer_jax.planner.rows import CheckpointSpec, new_checkpoint, new_owner, new_run, settled
from ninfer_jax.planner.state import PhysicalState, checkpoints_of, used
from ninfer_jax.program.history import Segment

__all__ = ["ContextContents", "Dropped", "Placed", "SavedCheckpoint", "place_context", "saved_checkpoints"]


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint without its place.

    Attributes:
        image: index into the images of its context; two checkpoints may share one.
        rebuild: prefill chunks, vision items and patches of a rebuild from root.
    """

    kind: CheckpointKind
    ordinal: int
    frontier_tokens: int
    rebuild: tuple[int, int, int]
    image: int


@dataclass(frozen=True, eq=False)
class ContextContents:
    """One context, whole."""

    identity: PromptIdentity  # exactly the endpoint's tokens
    history: tuple[Segment, ...]
    checkpoints: tuple[SavedCheckpoint, ...]  # shallowest first; the endpoint among them
    images: tuple[tuple[np.ndarray, ...], ...]  # leaf by leaf, each distinct image once
    pages: np.ndarray  # [pages of the endpoint, ...], in logical order, as the Host tier packs them


@dataclass(frozen=True)
class Dropped:
    """A checkpoint that was not restored, and why."""

    kind: CheckpointKind
    frontier_tokens: int
    reason: str


@dataclass(frozen=True, eq=False)
class Placed:
    """A state with the context in it, its bytes still to be written."""

    state: PhysicalState
    owner: OwnerId
    images: tuple[tuple[int, int, int], ...]  # (index of the image, Device slot or -1, Host slot or -1)
    dropped: tuple[Dropped, ...]


def saved_checkpoints(state: PhysicalState, owner: OwnerId) -> tuple[list[SavedCheckpoint], list[int]]:
    """Returns an owner's checkpoints, shallowest first, and the rows of their distinct images."""
    images: list[int] = []
    saved = []
    for row in checkpoints_of(state, owner):
        image = int(state.checkpoint_image[row])
        if image not in images:
            images.append(image)
        saved.append(
            SavedCheckpoint(
                CheckpointKind(int(state.checkpoint_kind[row])),
                int(state.checkpoint_ordinal[row]),
                int(state.checkpoint_frontier[row]),
                tuple(int(n) for n in state.checkpoint_rebuild[row]),  # type: ignore[arg-type]
                images.index(image),
            )
        )
    return saved, images


def place_context(
    state: PhysicalState, checkpoints: Sequence[SavedCheckpoint], *, max_long_anchors: int
) -> Placed | str:
    """Returns the state after a context got its rows, or why its endpoint has no place.

    Args:
        state: the current one.
        checkpoints: as saved; the deepest is the endpoint.
        max_long_anchors: anchors that a continuation may hold here.
    """
    endpoint = max(checkpoints, key=lambda c: c.frontier_tokens)
    page = state.capacity.page_tokens
    pages = ceil_div(endpoint.frontier_tokens, page)
    free = (state.capacity.units() - used(state)).tolist()
    tier = Tier.DEVICE
    if free[DEVICE_PAGES] < pages:
        granules = pages * int(state.capacity.page_granules()[0])
        if allocate(state.arena, granules) is None:
            room = f"{free[DEVICE_PAGES]} are free on Device"
            return f"{pages} pages are needed, {room}, and Host has no hole of that size"
        tier = Tier.HOST
    slots = {Tier.DEVICE: free[DEVICE_STATE], Tier.HOST: free[HOST_STATE]}
    places: dict[int, Tier] = {}
    dropped: list[Dropped] = []
    kept: list[SavedCheckpoint] = []
    # the endpoint chooses first, then the deepest of the others: it saves the most
    for checkpoint in sorted(checkpoints, key=lambda c: (c is not endpoint, -c.frontier_tokens)):
        reason = _refusal(checkpoint, kept, max_long_anchors)
        if reason is None and checkpoint.image not in places:
            place = next((t for t in (Tier.DEVICE, Tier.HOST) if slots[t] > 0), None)
            if place is None:
                reason = "no state slot is free"
            else:
                slots[place] -= 1
                places[checkpoint.image] = place
        if reason is None:
            kept.append(checkpoint)
        elif checkpoint is endpoint:
            return f"the endpoint has no place: {reason}"
        else:
            dropped.append(Dropped(checkpoint.kind, checkpoint.frontier_tokens, reason))
    state, owner = new_owner(state, OwnerKind.PRIVATE)
    columns = endpoint.frontier_tokens - (pages - 1) * page
    state, _ = new_run(state, owner, 0, 0, pages, columns, tier, writer=NO_OWNER)
    rows: dict[int, ImageId] = {}
    for checkpoint in sorted(kept, key=lambda c: c.frontier_tokens):
        spec = CheckpointSpec(
            checkpoint.frontier_tokens,
            checkpoint.kind,
            checkpoint.ordinal,
            (checkpoint.frontier_tokens,),
            image=rows.get(checkpoint.image),
            rebuild=checkpoint.rebuild,
        )
        state, row = new_checkpoint(state, owner, spec, places[checkpoint.image])
        rows[checkpoint.image] = ImageId(int(state.checkpoint_image[row]))
    state = settled(state)
    found = []
    for index, image in rows.items():
        device, host = int(state.image_device[image]), int(state.image_host[image])
        found.append((index, device if device != NO_SLOT else -1, host if host != NO_SLOT else -1))
    return Placed(state, owner, tuple(found), tuple(dropped))


def _refusal(
    checkpoint: SavedCheckpoint, kept: Sequence[SavedCheckpoint], max_long_anchors: int
) -> str | None:
    if checkpoint.kind is not CheckpointKind.LONG_ANCHOR:
        return None
    anchors = sum(other.kind is CheckpointKind.LONG_ANCHOR for other in kept)
    if anchors >= max_long_anchors:
        return f"this engine keeps {max_long_anchors} long anchors in a continuation"
    return None
