"""The enumerated fates of one owner, and which of them is a further degradation of which (T-5).

Owns: the list of option templates, their parameters for every victim, and the partial order. Owns no
resource effect: `problem` turns parameters into tables.

An option says which checkpoints stay alive and what happens to the replicas of what they need:

    alive       bit i = the owner's i-th checkpoint, shallowest first; coverage is the deepest alive one's
    state       action on the images that only checkpoints of `state_bits` refer to
    kv          action on the pages from `kv_from` on (per pool)

    action      Device-only       on both tiers     Host-only
    NONE        stays             stays             stays
    DROP_HOST   stays             Device only       stays
    DROP_DEVICE stays             Host only         stays
    DEMOTE      copied, then Host only   Host only  stays

Letters: V victims, K options, M checkpoints of one owner at most, N pools, T templates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP

MAX_CHECKPOINTS = 30  # bits of one int32 alive mask


class ReplicaAction(IntEnum):
    """What an option does to the replicas it acts on; a larger number degrades at least as much."""

    NONE = 0
    DROP_HOST = 1
    DROP_DEVICE = 2
    DEMOTE = 3


class Survivors(IntEnum):
    """Rule that picks the surviving checkpoints of an owner with m of them."""

    ALL = 0
    NOBODY = 1
    WITHOUT_DEEPEST = 2  # argument j: the j deepest go
    WITHOUT_SHALLOWEST = 3  # argument j: the j shallowest go; only images become free
    ONLY_DEEPEST = 4
    ONLY_SHALLOWEST = 5
    WITHOUT_DEEPEST_SIZED = 6  # as many deep ones as the residual asks for
    EXACTLY = 7  # argument: the alive mask itself


class Extent(IntEnum):
    """How much of the surviving data an action takes."""

    EVERYTHING = 0
    SIZED = 1  # just enough for the residual: page tail, or shallowest images
    SIZED_SMALL = 2  # the same for the smallest residual among the candidates


@dataclass(frozen=True)
class Template:
    """One option rule, the same for all owners; owners for which it means nothing new have it invalid."""

    survivors: Survivors
    argument: int = 0
    state: ReplicaAction = ReplicaAction.NONE
    state_extent: Extent = Extent.EVERYTHING
    kv: ReplicaAction = ReplicaAction.NONE
    kv_extent: Extent = Extent.EVERYTHING


@dataclass(frozen=True, eq=False)
class OptionTable:
    """Parameters of every (victim, option)."""

    templates: tuple[Template, ...]  # T = K
    alive: np.ndarray  # int32[V, K], bit mask over the owner's checkpoints
    state_action: np.ndarray  # int8[K]
    state_bits: np.ndarray  # int32[V, K]
    kv_action: np.ndarray  # int8[K]
    kv_from: np.ndarray  # int32[V, K, N], first page acted on
    cover: np.ndarray  # int32[V, K, N], pages that surviving checkpoints need
    valid: np.ndarray  # bool[V, K]; ABSENT is never valid: only a candidate sets it


@lru_cache(maxsize=64)
def make_templates(max_checkpoints: int, max_options: int) -> tuple[Template, ...]:
    """Returns the option templates, most useful first, cut to `max_options`.

    With up to three checkpoints every set of survivors is offered; beyond that those that keep a prefix, a
    suffix, one end, or what the residual asks for.

    Raises:
        ValueError: if fewer than the three fixed codes are allowed.
    """
    if max_options < 3:
        raise ValueError(f"max_options must be at least 3 (keep, absent, evict), got {max_options}")
    a, s, x = ReplicaAction, Survivors, Extent
    demote_all = Template(s.ALL, state=a.DEMOTE, kv=a.DEMOTE)
    core = [
        Template(s.ALL),  # KEEP
        Template(s.ALL),  # ABSENT
        Template(s.NOBODY),  # EVICT
        demote_all,
        Template(s.ALL, kv=a.DEMOTE),
        Template(s.ALL, state=a.DEMOTE),
        Template(s.ALL, kv=a.DEMOTE, kv_extent=x.SIZED),
        Template(s.ALL, state=a.DROP_HOST, kv=a.DROP_HOST),
        Template(s.ALL, state=a.DROP_DEVICE, kv=a.DROP_DEVICE),
    ]
    if max_checkpoints > 1:
        core += [
            Template(s.ONLY_DEEPEST),
            Template(s.WITHOUT_DEEPEST, 1),
            Template(s.WITHOUT_DEEPEST_SIZED),
            Template(s.ONLY_SHALLOWEST),
            replace(demote_all, survivors=s.ONLY_DEEPEST),
            replace(demote_all, survivors=s.WITHOUT_DEEPEST_SIZED),
            Template(s.ALL, state=a.DEMOTE, state_extent=x.SIZED),
        ]
    core += [
        Template(s.ALL, kv=a.DROP_HOST),
        Template(s.ALL, state=a.DROP_HOST),
        Template(s.ALL, kv=a.DROP_DEVICE),
        Template(s.ALL, state=a.DROP_DEVICE),
        Template(s.ALL, kv=a.DEMOTE, kv_extent=x.SIZED_SMALL),
        Template(s.ALL, state=a.DEMOTE, kv=a.DEMOTE, kv_extent=x.SIZED),
        Template(s.ALL, state=a.DEMOTE, kv=a.DROP_HOST),
        Template(s.ALL, state=a.DROP_HOST, kv=a.DEMOTE),
        Template(s.ALL, state=a.DROP_DEVICE, kv=a.DROP_HOST),
        Template(s.ALL, state=a.DROP_HOST, kv=a.DROP_DEVICE),
    ]
    survivors: list[tuple[Survivors, int]] = []
    if 1 < max_checkpoints <= 3:
        survivors = [(s.EXACTLY, mask) for mask in range(1, 2**max_checkpoints)]
    elif max_checkpoints > 3:
        survivors = [(s.ONLY_DEEPEST, 0), (s.ONLY_SHALLOWEST, 0)]
        for j in range(1, max_checkpoints - 1):
            survivors += [(s.WITHOUT_DEEPEST, j), (s.WITHOUT_SHALLOWEST, j)]
    actions = [
        Template(s.ALL),
        demote_all,
        Template(s.ALL, kv=a.DEMOTE),
        Template(s.ALL, state=a.DEMOTE),
        Template(s.ALL, kv=a.DEMOTE, kv_extent=x.SIZED),
        Template(s.ALL, state=a.DROP_HOST, kv=a.DROP_HOST),
        Template(s.ALL, state=a.DROP_DEVICE, kv=a.DROP_DEVICE),
    ]
    for action in actions:
        core += [replace(action, survivors=rule, argument=argument) for rule, argument in survivors]
    distinct = core[:2] + [t for t in dict.fromkeys(core[2:]) if t != core[0]]
    return tuple(distinct[:max_options])


@dataclass(frozen=True, eq=False)
class _Rules:
    """The templates as columns, so that all owners and options are worked out at once."""

    survivors: np.ndarray  # int64[K], Survivors
    argument: np.ndarray  # int64[K]
    state: np.ndarray  # int8[K], ReplicaAction
    state_extent: np.ndarray  # int64[K], Extent
    kv: np.ndarray  # int8[K], ReplicaAction
    kv_extent: np.ndarray  # int64[K], Extent


@lru_cache(maxsize=64)
def template_columns(templates: tuple[Template, ...]) -> _Rules:
    """Returns the templates' fields as arrays of K."""
    return _Rules(
        np.asarray([t.survivors for t in templates], np.int64),
        np.asarray([t.argument for t in templates], np.int64),
        np.asarray([t.state for t in templates], np.int8),
        np.asarray([t.state_extent for t in templates], np.int64),
        np.asarray([t.kv for t in templates], np.int8),
        np.asarray([t.kv_extent for t in templates], np.int64),
    )


def survivors_of(templates: tuple[Template, ...], counts: np.ndarray, sized_drop: np.ndarray) -> np.ndarray:
    """Returns int32[V, K], the alive mask of every owner; 0 where a rule means nothing for it.

    Args:
        counts: int32[V], checkpoints of each owner.
        sized_drop: int32[V], deepest checkpoints to drop for WITHOUT_DEEPEST_SIZED.
    """
    rules = template_columns(templates)
    rule, j = rules.survivors, rules.argument
    count = counts.astype(np.int64)[:, None]
    everything = (np.int64(1) << count) - 1
    only = (rule == int(Survivors.ONLY_DEEPEST)) | (rule == int(Survivors.ONLY_SHALLOWEST))
    drop = np.where(only, count - 1, j)
    sized = rule == int(Survivors.WITHOUT_DEEPEST_SIZED)
    drop = np.where(sized, sized_drop.astype(np.int64)[:, None], drop)
    shallow_go = (rule == int(Survivors.ONLY_DEEPEST)) | (rule == int(Survivors.WITHOUT_SHALLOWEST))
    exactly = rule == int(Survivors.EXACTLY)
    shift = np.minimum(np.where(exactly, 0, drop), MAX_CHECKPOINTS + 1)  # an EXACTLY mask is no shift
    alive = np.where(drop < count, everything >> shift, 0)
    alive = np.where(shallow_go, alive << shift, alive)
    alive = np.where(exactly, np.where(j <= everything, j, 0), alive)
    alive = np.where(rule == int(Survivors.ALL), everything, alive)
    return np.where(rule == int(Survivors.NOBODY), 0, alive).astype(np.int32)


def refines(options: OptionTable) -> np.ndarray:
    """Returns bool[V, K, K]: option k2 is valid and degrades owner v further than k1 (monotone, T-5).

    Every owner's relation is a strict partial order with KEEP below everything and EVICT above everything:
    survivors shrink, and what an action already took stays taken.
    """
    alive, k = options.alive, options.alive.shape[1]
    fewer = (alive[:, None, :] & ~alive[:, :, None]) == 0
    state, kv = options.state_action.astype(np.int32), options.kv_action.astype(np.int32)
    stronger_state = _at_least(state)[None]
    bits1, bits2 = options.state_bits[:, :, None], options.state_bits[:, None, :]
    taken_state = stronger_state & ((bits1 & ~bits2 & alive[:, None, :]) == 0) | (state == 0)[None, :, None]
    from1, from2 = options.kv_from[:, :, None, :], options.kv_from[:, None, :, :]
    kept = options.cover[:, None, :, :]
    taken_kv = _at_least(kv)[None] & np.all(np.minimum(from1, kept) >= np.minimum(from2, kept), -1)
    taken_kv |= (kv == 0)[None, :, None]
    order = fewer & taken_state & taken_kv
    order[:, KEEP, :] = True
    order[:, :, EVICT] = True
    order[:, EVICT, :] = False
    order[:, :, KEEP] = False
    order[:, ABSENT, :] = order[:, :, ABSENT] = False
    order &= options.valid[:, None, :] & ~np.eye(k, dtype=bool)[None]
    both = order & order.transpose(0, 2, 1)  # equal parameters: the later one follows the earlier
    return order & ~(both & np.tril(np.ones((k, k), bool))[None])


def _at_least(action: np.ndarray) -> np.ndarray:
    """Returns bool[K, K]: applying k1's action and then k2's is what k2's alone does."""
    a1, a2 = action[:, None], action[None, :]
    demote = int(ReplicaAction.DEMOTE)
    follows = (a1 == int(ReplicaAction.DROP_DEVICE)) & (a2 == demote)
    return (a1 == a2) | (a1 == 0) | follows
