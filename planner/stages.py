"""The canonical order of one transition, and its peak on every axis (R-10, X-5, design 3).

Owns: which change belongs to which stage; the running sums; the maximum. Owns no decision.

    stage              Device                                     Host
    HOST_RELEASES      - freed without a copy                     - freed without a copy
    COPY_PREPARATION   + staging buffer of packed pages           + D2H destinations
    COPIES_IN_FLIGHT
    COPY_PUBLICATION   - replaced replicas, - staging
    RESTORE            + H2D, + state and tail-page destinations
    COMMITTED          + growth reservation, - consumed leftovers - consumed source's replicas

Letters: R axes, J items (0 = StateImage, 1 + n = page of pool n), S = 6 stages. All functions take `xp`,
numpy or jax.numpy, and any leading batch dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

NUM_STAGES = 6

Array = Any  # numpy.ndarray or jax.Array, depending on `xp`


@dataclass(frozen=True, eq=False)
class Changes:
    """Unit changes of one transition by kind; every field is int32[..., J]."""

    device_now: Array  # Device replicas freed without a copy
    device_copied: Array  # Device replicas freed after their Host replica is published
    device_late: Array  # Device replicas of the consumed source, freed at commit
    host_now: Array
    host_late: Array
    d2h: Array
    h2d: Array  # replicas restored in place
    fresh: Array  # Device units that become the sequence's own: fork, tail copy, root image
    growth: Array  # reserved and not materialised
    staging: Array  # at most this many pages of the pool hold packed copies in flight


def to_axes(xp: ModuleType, device: Array, host: Array, granules: Array) -> Array:
    """Returns int32[..., R] from per-item changes of both tiers.

    Args:
        device, host: int32[..., J].
        granules: int32[N], arena granules per page.
    """
    kv = (host[..., 1:] * granules).sum(-1, keepdims=True).astype(xp.int32)
    return xp.concatenate([device[..., :1], host[..., :1], kv, device[..., 1:]], -1)


def stage_used(xp: ModuleType, used0: Array, changes: Changes, granules: Array) -> Array:
    """Returns int32[..., S + 1, R], occupancy before the transition and after each stage."""
    zero = xp.zeros_like(changes.d2h)
    staged = xp.minimum(changes.d2h, changes.staging)
    per_stage = [
        to_axes(xp, -changes.device_now, -changes.host_now, granules),
        to_axes(xp, staged, changes.d2h, granules),
        to_axes(xp, zero, zero, granules),
        to_axes(xp, -changes.device_copied - staged, zero, granules),
        to_axes(xp, changes.h2d + changes.fresh, zero, granules),
        to_axes(xp, changes.growth - changes.device_late, -changes.host_late, granules),
    ]
    levels = [xp.broadcast_to(used0, per_stage[0].shape)]
    for delta in per_stage:
        levels.append(levels[-1] + delta)
    return xp.stack(levels, -2)


def stage_peaks(xp: ModuleType, used: Array) -> Array:
    """Returns int32[..., R], the largest occupancy over the start state and all stages (R-10).

    Args:
        used: int32[..., S + 1, R].
    """
    return used.max(-2)
