"""Identity targets: activation and source disposition, nobody under pressure (T-4, G-2).

Owns: the same assessment as `projection` gives for these targets, from the source's own objects alone. A
round whose identities fit ends here, without options and tables. Owns no other target.

With everybody else keeping what they have, an object leaves a tier only if its source lets go of it and no
other holder is left; nothing is copied to Host, and nothing is freed before the commit. A source has few
objects, so plain numbers are faster than arrays.

Letters: B targets, J items, R axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.candidate import Candidate, Disposition
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, HOST_KV, HOST_STATE
from ninfer_jax.planner.holders import Holdings
from ninfer_jax.planner.needs import growth_pages
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.sources import ImageRule, TailRule, image_rule, surviving_bits, tail_rule
from ninfer_jax.planner.stages import NUM_STAGES


@dataclass(frozen=True, eq=False)
class IdentityChange:
    """What one candidate's identity copies, takes and frees; lists of J units.

    Attributes:
        is_improvable: others decide whether the state or a tail page is copied, so that pressure could make
            the candidate cheaper (G-2).
    """

    restored: list[int]
    restored_ops: list[int]
    tail_h2d: list[int]
    d2d: list[int]
    fresh: int
    growth: list[int]
    device_late: list[int]
    host_late: list[int]
    is_fork: bool
    is_improvable: bool


def identity_change(holdings: Holdings, candidate: Candidate) -> IdentityChange:
    """Returns the change of one candidate's identity."""
    state, objects, x = holdings.state, holdings.objects, holdings.lists
    items, page = 1 + state.capacity.num_pools, state.capacity.page_tokens
    restored, ops, tail_h2d, d2d, device_late, host_late = ([0] * items for _ in range(6))
    if candidate.checkpoint is None:
        growth = growth_pages(state.capacity, candidate, None)
        return IdentityChange(restored, ops, tail_h2d, d2d, 1, growth, device_late, host_late, False, False)
    source = int(candidate.checkpoint)
    owner = int(state.checkpoint_owner[source])
    consume = candidate.disposition == Disposition.CONSUME
    base = state.checkpoint_kv_tokens[source]
    whole, tail = zip(*(divmod(t, page) for t in base.tolist()), strict=True)
    image_rows, run_rows = holdings.entries_of(owner)

    image = int(state.checkpoint_image[source])
    alive = surviving_bits(holdings, candidate, owner)
    images, bits = x.obj[image_rows], x.bits[image_rows]
    rule = image_rule(holdings, owner, image, stays=bool(bits[images.index(image)] & alive))
    others = x.holders[image] > 1
    is_improvable = rule == ImageRule.BY_OTHERS
    is_fork = rule == ImageRule.FORK or (rule == ImageRule.BY_OTHERS and others)
    if is_fork:
        (d2d if x.device[image] else tail_h2d)[0] += 1

    for obj, its_bits in zip(images, bits, strict=True):
        stays = bool(its_bits & alive)
        need = obj == image and not is_fork
        if need and not x.device[obj]:
            restored[0] += 1
            ops[0] += 1
        if consume and not stays and x.holders[obj] == 1:
            hold = need or (obj == image and rule != ImageRule.MOVE)
            device_late[0] += x.device[obj] and not (x.fixed_device[obj] or hold)
            host_late[0] += x.host[obj] and not x.fixed_host[obj]

    rows = (x.obj[run_rows], x.start[run_rows], x.end[run_rows])
    for obj, start, end in zip(*rows, strict=True):
        item, size = x.item[obj], end - start
        need = end <= whole[item - 1]
        if start == whole[item - 1] and tail[item - 1]:
            how = tail_rule(objects, obj, consume)
            copied = how == TailRule.COPY or (how == TailRule.BY_OTHERS and x.holders[obj] > 1)
            is_improvable |= how == TailRule.BY_OTHERS
            need = not copied
            if copied:
                (d2d if x.device[obj] else tail_h2d)[item] += 1
        if need and not x.device[obj]:
            restored[item] += size
            ops[item] += 1
        if consume and x.holders[obj] == 1:
            device_late[item] += size * (x.device[obj] and not (x.fixed_device[obj] or need))
            host_late[item] += size * (x.host[obj] and not x.fixed_host[obj])
    growth = growth_pages(state.capacity, candidate, base)
    return IdentityChange(
        restored, ops, tail_h2d, d2d, 0, growth, device_late, host_late, is_fork, is_improvable
    )


def assess_identities(holdings: Holdings, changes: Sequence[IdentityChange]) -> Assessment:
    """Returns the assessment of B identity targets.

    Args:
        changes: from `identity_change`, one of each target.
    """
    capacity = holdings.state.capacity
    granules, before = capacity.page_granules().tolist(), holdings.used0.tolist()
    used = []
    for c in changes:
        taken = [r + t + d for r, t, d in zip(c.restored, c.tail_h2d, c.d2d, strict=True)]
        restored, end = list(before), list(before)
        restored[DEVICE_STATE] += taken[0] + c.fresh
        restored[DEVICE_PAGES:] = [u + t for u, t in zip(before[DEVICE_PAGES:], taken[1:], strict=True)]
        end[DEVICE_STATE] = restored[DEVICE_STATE] - c.device_late[0]
        end[HOST_STATE] -= c.host_late[0]
        end[HOST_KV] -= sum(n * g for n, g in zip(c.host_late[1:], granules, strict=True))
        end[DEVICE_PAGES:] = [
            u + g - n for u, g, n in zip(restored[DEVICE_PAGES:], c.growth, c.device_late[1:], strict=True)
        ]
        used.append([before] * (NUM_STAGES - 1) + [restored, end])
    occupancy = np.asarray(used, np.int32)
    peak = occupancy.max(1)
    residual = np.maximum(peak - capacity.units(), 0)
    tail_h2d = np.asarray([c.tail_h2d for c in changes], np.int32)
    nothing, none = np.zeros_like(tail_h2d), np.zeros(len(changes), np.int32)
    return Assessment(
        used=occupancy,
        peak=peak,
        residual=residual,
        fits=~residual.any(1),
        d2h=nothing,
        d2h_ops=nothing,
        h2d=np.asarray([c.restored for c in changes], np.int32) + tail_h2d,
        h2d_ops=np.asarray([c.restored_ops for c in changes], np.int32) + tail_h2d,
        d2d=np.asarray([c.d2d for c in changes], np.int32),
        is_fork=np.asarray([c.is_fork for c in changes]),
        evictions=none,
        drops=none,
        degraded=none,
    )
