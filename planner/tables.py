"""The arrays that the projection reads: what every option of every victim does, what every candidate needs.

Owns: `Tables`, their padding, and which options mean something new for their owner. Vectorised NumPy over
victims, options and address-space entries: cost follows entries x options, never pages. Owns no choice.

Every object (StateImage or page run) falls into one of three groups:

    one victim alone holds it          -> its fate is that owner's option: summed up in `contributions`
    two or more, or a victim and an    -> a *class*: options say in `device_mask/host_mask` whether the owner
    active or protected holder            still needs it there; the fate is the OR over all holders (T-6)
    nobody eligible holds it           -> nothing changes, except for the candidate whose source it is

The final Device replica of a class survives while any holder wants it there. A holder that demoted a class is
also served by somebody else's Device replica, so a Host copy is made only when the Device replica goes.

A candidate's source is no victim of that candidate: its row must carry the code ABSENT, and what it keeps,
hands over or releases is in the candidate's own columns and masks (G-8, N-9).

Letters: V victims, K options, C classes, D candidates, J items, N pools, R axes, W mask words, P columns of
`contributions`, F columns of `needs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import jax
import numpy as np
from ninfer_jax.planner.contributions import NUM_CONTRIBUTIONS, class_masks, lone_contributions
from ninfer_jax.planner.holders import Holdings
from ninfer_jax.planner.ids import NO_CLASS
from ninfer_jax.planner.needs import NUM_NEEDS, Needs
from ninfer_jax.planner.options import OptionTable
from ninfer_jax.planner.target import ABSENT, EVICT

CLASS_BUCKETS: Final = (32, 64, 128, 256, 512, 1024, 2048)
VICTIM_BUCKETS: Final = (8, 16, 64, 128, 256, 512, 1024)
OPTION_BUCKETS: Final = (16, 32, 64, 128)
CANDIDATE_BUCKETS: Final = (8, 16, 32, 64, 128)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Tables:
    """The arrays that the projection reads, padded to buckets so that few shapes are ever compiled."""

    contributions: (
        np.ndarray
    )  # int32[V, K, 5 * J + 2]: five groups of J, then evictions and dropped checkpoints
    device_mask: np.ndarray  # uint32[V, K, W], bit c: the owner still needs class c on Device
    host_mask: np.ndarray  # uint32[V, K, W]
    class_units: np.ndarray  # int32[C, J], size of the class in its item's column
    class_device: np.ndarray  # bool[C], on Device now
    class_host: np.ndarray  # bool[C], on Host now
    fixed_device: np.ndarray  # bool[C], an owner outside the domain needs it on Device
    fixed_host: np.ndarray  # bool[C]
    needs: np.ndarray  # int32[D, 9 * J]
    need_class: np.ndarray  # bool[D, C], the sequence will use it on Device (restored if it is not)
    hold_device: np.ndarray  # bool[D, C], the source keeps it there
    hold_host: np.ndarray  # bool[D, C]
    late_class: np.ndarray  # bool[D, C], held by a consumed source until commit
    tail_class: np.ndarray  # int32[D, N], partial tail page whose owner decides in place or copy; or NO_CLASS
    image_class: np.ndarray  # int32[D], source image whose other holders decide Move or Fork; or NO_CLASS
    used0: np.ndarray  # int32[R]
    capacity: np.ndarray  # int32[R]
    granules: np.ndarray  # int32[N]
    staging: np.ndarray  # int32[J]


def make_tables(holdings: Holdings, options: OptionTable, needs: Needs) -> tuple[Tables, np.ndarray]:
    """Returns the padded tables and bool[V, K], the options that mean something new for their owner."""
    state, victims, counts = holdings.state, holdings.victims, holdings.counts
    entries, objects, shared = holdings.entries, holdings.objects, holdings.shared
    pools = state.capacity.num_pools
    items = 1 + pools
    v, k, d = len(victims), len(options.templates), len(needs.needs)
    c = len(shared)
    vp, kp = _bucket(v, VICTIM_BUCKETS), _bucket(k, OPTION_BUCKETS)
    cp, dp = _bucket(c, CLASS_BUCKETS), _bucket(d, CANDIDATE_BUCKETS)

    contributions = np.zeros((vp, kp, NUM_CONTRIBUTIONS * items + 2), np.int32)
    contributions[:v, :k, :-2] = lone_contributions(options, entries, objects, items)
    alive_count = np.bitwise_count(options.alive.astype(np.uint32)).astype(np.int32)
    contributions[:v, EVICT, -2] = 1
    contributions[:v, :k, -1] = counts[victims][:, None] - alive_count
    contributions[:, ABSENT] = 0
    device_mask, host_mask = class_masks(options, entries, objects, (vp, kp, cp), ABSENT)

    words = device_mask.shape[-1]
    effect = np.empty((v, k, contributions.shape[-1] + 2 * words + 1), np.int64)
    effect[..., : -2 * words - 1] = contributions[:v, :k]
    effect[..., -2 * words - 1 : -words - 1] = device_mask[:v, :k]
    effect[..., -words - 1 : -1] = host_mask[:v, :k]
    effect[..., -1] = options.alive
    digest = effect @ _odd_weights(effect.shape[-1])
    same = digest[:, :, None] == digest[:, None, :]
    same &= np.tri(k, k, -1, dtype=bool) & options.valid[:, None, :]
    same[:, ABSENT] = same[:, :, ABSENT] = False
    valid = options.valid & ~same.any(-1)

    units = np.zeros((cp, items), np.int32)
    units[np.arange(c), objects.item[shared]] = objects.size[shared]

    def padded(array: np.ndarray, shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
        out = np.full(shape, fill, array.dtype)
        out[tuple(slice(0, n) for n in array.shape)] = array
        return out

    tables = Tables(
        contributions,
        device_mask,
        host_mask,
        units,
        padded(objects.device[shared], (cp,)),
        padded(objects.host[shared], (cp,)),
        padded(objects.fixed_device[shared], (cp,)),
        padded(objects.fixed_host[shared], (cp,)),
        padded(needs.needs.reshape(d, -1), (dp, NUM_NEEDS * items)),
        padded(needs.need_class, (dp, cp)),
        padded(needs.hold_device, (dp, cp)),
        padded(needs.hold_host, (dp, cp)),
        padded(needs.late_class, (dp, cp)),
        padded(needs.tail_class, (dp, pools), NO_CLASS),
        padded(needs.image_class, (dp,), NO_CLASS),
        holdings.used0,
        state.capacity.units(),
        state.capacity.page_granules(),
        np.asarray([0, *(p.staging_pages for p in state.capacity.pools)], np.int32),
    )
    return tables, valid


def _bucket(size: int, buckets: tuple[int, ...]) -> int:
    for b in buckets:
        if size <= b:
            return b
    return -(-size // buckets[-1]) * buckets[-1]


def _odd_weights(n: int) -> np.ndarray:
    """Returns int64[n] odd multipliers without linear relations among small counts (splitmix64)."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
