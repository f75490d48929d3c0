"""Which of the four readiness answers a request gets (G-4, G-5, G-14).

Owns: the gates outside any search - static contract, lanes, open transaction - and the reading of an
assessed target. Chooses no target.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.candidate import RequestWork
from ninfer_jax.planner.capacity import PhysicalCapacity, ceil_div
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.plan import Readiness
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.state import PhysicalState


def isolated_root_fits(capacity: PhysicalCapacity, request: RequestWork) -> bool:
    """Returns whether the request would run from root on an empty engine (G-5)."""
    pages = [ceil_div(t, capacity.page_tokens) for t in request.capacity_tokens]
    room = [pool.device_pages for pool in capacity.pools]
    return capacity.device_state_slots >= 1 and all(p <= r for p, r in zip(pages, room, strict=True))


def gate(state: PhysicalState, request: RequestWork) -> Readiness | None:
    """Returns the answer that needs no planning, or None if a round must be planned.

    A request that would never fit is told so even while something else blocks it.
    """
    if not isolated_root_fits(state.capacity, request):
        return Readiness.PERMANENTLY_INFEASIBLE
    active = int(np.count_nonzero(state.owner_kind == OwnerKind.ACTIVE))
    if state.open_transaction or active >= state.capacity.lanes:
        return Readiness.TEMPORARILY_BLOCKED
    return None


def readiness(
    state: PhysicalState, request: RequestWork, chosen: Assessment | None, row: int = 0
) -> Readiness:
    """Returns the answer for the chosen target, or for having found none.

    Args:
        chosen: assessment of the target that would be sealed; None if not even root-maximal is adoptable.
        row: its row.
    """
    early = gate(state, request)
    if early is not None:
        return early
    if chosen is None or not bool(chosen.fits[row]):
        return Readiness.TEMPORARILY_BLOCKED
    quiet = not chosen.degraded[row] and not chosen.h2d[row].any() and not chosen.d2h[row].any()
    return Readiness.READY if quiet else Readiness.NEEDS_TRANSFER
