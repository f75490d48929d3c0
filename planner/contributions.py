"""What every option of every owner does to the objects: sums for its own, bits for shared classes.

Owns: the two table halves that depend on options (design 3.1). An owner's pages of one kind are a step
function of the logical page, so "pages beyond the coverage" and "pages from the demoted tail on" are
differences of prefix sums: cost follows owners x options, not pages and not runs.

Letters: V victims, K options, E entries, C classes, J items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.holders import Entries, Objects
from ninfer_jax.planner.options import OptionTable, ReplicaAction

# column groups; each is J wide, then evictions and dropped checkpoints follow
DEVICE_NOW, DEVICE_COPIED, HOST_NOW, D2H, D2H_OPS = range(5)
NUM_CONTRIBUTIONS = 5

# plain ints: NumPy compares an IntEnum member through its object protocol
_DROP_HOST, _DROP_DEVICE, _DEMOTE = (
    int(a) for a in (ReplicaAction.DROP_HOST, ReplicaAction.DROP_DEVICE, ReplicaAction.DEMOTE)
)


def lone_contributions(options: OptionTable, entries: Entries, objects: Objects, items: int) -> np.ndarray:
    """Returns int32[V, K, 5 * J]: what an option frees and copies of the objects its owner alone holds."""
    v, k = options.alive.shape
    out = np.zeros((v, k, NUM_CONTRIBUTIONS * items), np.int32)
    if not v:
        return out
    obj = entries.obj
    lone = (entries.victim >= 0) & (objects.class_of[obj] < 0) & (objects.holders[obj] == 1)
    lone &= ~(objects.fixed_device[obj] | objects.fixed_host[obj])
    item = objects.item[obj]
    rows = np.flatnonzero(lone & (item == 0))
    if len(rows):
        out[..., 0::items] = _images(options, entries, objects, rows)
    for pool in range(items - 1):
        rows = np.flatnonzero(lone & (item == pool + 1))
        if len(rows):
            out[..., pool + 1 :: items] = _pages(options, entries, objects, rows, pool)
    return out


def _images(options: OptionTable, entries: Entries, objects: Objects, rows: np.ndarray) -> np.ndarray:
    """Returns int32[V, K, 5] over the images of `rows`, which are sorted by victim."""
    v, k = options.alive.shape
    who, obj = entries.victim[rows], entries.obj[rows]
    device, host = objects.device[obj], objects.host[obj]
    kept, acted = image_fates(options, who, entries.bits[rows])
    act, hit = options.state_action, kept & acted
    both = (device & host)[:, None]
    values = np.empty((3, len(rows), k), bool)
    values[0] = (~kept & device[:, None]) | (hit & (act >= _DROP_DEVICE) & both)
    values[1] = hit & (act == _DEMOTE) & (device & ~host)[:, None]
    values[2] = (~kept & host[:, None]) | (hit & (act == _DROP_HOST) & both)
    firsts = np.flatnonzero(np.diff(who, prepend=-1))
    sums = np.zeros((v, k, 3), np.int32)
    # an owner has at most 30 images of its own, so a byte holds the sum
    counts = np.add.reduceat(values.view(np.uint8), firsts, axis=1, dtype=np.uint8)
    sums[who[firsts]] = counts.transpose(1, 2, 0)
    return sums[..., [0, 1, 2, 1, 1]]


@dataclass(frozen=True, eq=False)
class _Steps:
    """Prefix sums of one owner's pages by kind, read at any logical page."""

    key: np.ndarray  # int64[E], owner and first page, ascending
    stride: np.int64
    first: np.ndarray  # int64[V], first entry of the owner
    end: np.ndarray  # int32[E]
    prefix: np.ndarray  # int32[E + 1, 4]: pages on Device, on Host, on both, on Device only
    kinds: np.ndarray  # bool[E, 4]
    only: np.ndarray  # int32[E + 1], runs on Device only

    def until(self, page: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns pages of each kind before `page` int32[..., V, K, 4], Device-only runs that begin before
        it, and whether such a run reaches beyond it."""
        at = np.arange(len(self.first), dtype=np.int64)[:, None] * self.stride + page
        index = np.searchsorted(self.key, at)
        last = np.maximum(index - 1, 0)
        open_ = index > self.first[:, None]
        over = np.where(open_, np.maximum(self.end[last] - page, 0), 0)
        pages = self.prefix[index] - self.prefix[self.first][:, None]
        pages = pages - over[..., None] * self.kinds[last]
        runs = self.only[index] - self.only[self.first][:, None]
        return pages, runs, (over > 0) & self.kinds[last, 3]


def _pages(
    options: OptionTable, entries: Entries, objects: Objects, rows: np.ndarray, pool: int
) -> np.ndarray:
    """Returns int32[V, K, 5] over the runs of `rows` (one pool), sorted by victim and first page."""
    v = options.alive.shape[0]
    who, obj = entries.victim[rows], entries.obj[rows]
    device, host, size = objects.device[obj], objects.host[obj], objects.size[obj]
    kinds = np.stack([device, host, device & host, device & ~host], -1)
    stride = np.int64(entries.end.max(initial=0) + 2)
    prefix = np.zeros((len(rows) + 1, 4), np.int32)
    np.cumsum(kinds * size[:, None], axis=0, out=prefix[1:])
    only = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(kinds[:, 3], out=only[1:])
    bounds = np.searchsorted(who, np.arange(v + 1))
    steps = _Steps(
        who * stride + entries.start[rows], stride, bounds[:-1], entries.end[rows], prefix, kinds, only
    )
    cover = options.cover[..., pool]
    tail = np.minimum(options.kv_from[..., pool], cover)
    (kept, before), (kept_runs, runs_before), (_, cut) = steps.until(np.stack([cover, tail]))
    total = prefix[bounds[1:]] - prefix[bounds[:-1]]
    gone, acted = total[:, None] - kept, kept - before
    act = options.kv_action
    demoted = np.where(act == _DEMOTE, acted[..., 3], 0)
    return np.stack(
        [
            gone[..., 0] + np.where(act >= _DROP_DEVICE, acted[..., 2], 0),
            demoted,
            gone[..., 1] + np.where(act == _DROP_HOST, acted[..., 2], 0),
            demoted,
            np.where(demoted > 0, kept_runs - runs_before + cut, 0),
        ],
        -1,
    )


def class_masks(
    options: OptionTable,
    entries: Entries,
    objects: Objects,
    shape: tuple[int, int, int],
    absent: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns uint32[V, K, W] twice: the classes each option still needs on Device, on Host.

    A shared run is only acted on whole: part of it would have to become a class of its own.

    Args:
        shape: padded (V, K, C).
        absent: the code whose rows stay empty.
    """
    out = np.zeros((2, shape[0], shape[1], -(-shape[2] // 32)), np.uint32)
    rows = np.flatnonzero((entries.victim >= 0) & (objects.class_of[entries.obj] >= 0))
    if len(rows):
        k = options.alive.shape[1]
        who, obj = entries.victim[rows], entries.obj[rows]
        item, cls = objects.item[obj], objects.class_of[obj]
        is_run = (item > 0)[:, None]
        kept, acted = image_fates(options, who, entries.bits[rows])
        pool, start = np.maximum(item - 1, 0), entries.start[rows, None]
        kept = np.where(is_run, start < options.cover[who, :, pool], kept)
        acted = np.where(is_run, start >= options.kv_from[who, :, pool], acted)
        act = np.where(is_run, options.kv_action[None], options.state_action[None])
        act = np.where(kept & acted, act, 0)
        device, host = objects.device[obj][:, None], objects.host[obj][:, None]
        demoted = act == _DEMOTE
        leaves = demoted | ((act == _DROP_DEVICE) & host)
        wants = np.empty((2, *kept.shape), bool)
        wants[0] = kept & device & ~leaves
        wants[1] = kept & ((host & ~((act == _DROP_HOST) & device)) | demoted)
        wants[..., absent] = False
        # one bit per row: the rows of one victim and word add up to that word
        word = who.astype(np.int64) * out.shape[3] + (cls >> 5)
        order = np.argsort(word, kind="stable")
        firsts = np.flatnonzero(np.diff(word[order], prepend=-1))
        bit = np.uint32(1) << (cls & 31).astype(np.uint32)
        words = np.add.reduceat((wants * bit[:, None])[:, order], firsts, axis=1, dtype=np.uint32)
        owner, column = np.divmod(word[order[firsts]], out.shape[3])
        out[:, owner, :k, column] = words.transpose(1, 0, 2)
    return out[0], out[1]


def image_fates(options: OptionTable, who: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns bool[E, K] twice: some survivor refers to the image; the option acts on all who do."""
    alive = bits[:, None] & options.alive[who]
    return alive != 0, (alive & ~options.state_bits[who]) == 0
