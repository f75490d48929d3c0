"""Which ends the shared classes of a batch of targets come to, each distinct one once.

Owns: what the holders of every target together want of the classes, and the grouping of targets by candidate
and that. Owns no sum over victims and no price.

Letters: B targets, V victims, K options, C classes, G groups, W words of 64 bits: classes on Device, then on
Host, as in `Tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.cells import Cells
from ninfer_jax.planner.tables import Tables


@dataclass(frozen=True, eq=False)
class ClassTables:
    """The masks of `Tables` in words. Build with `make_class_tables`."""

    words: np.ndarray  # uint64[V, K, W], classes that the owner needs with the option
    fixed: np.ndarray  # uint64[W], needed by an owner outside the domain
    digest: np.ndarray  # int64[V, K], equal where an owner's options need the same classes


@dataclass(frozen=True, eq=False)
class ClassPatterns:
    """The distinct (candidate, wanted classes) of a batch."""

    group: np.ndarray  # int64[B]
    candidate: np.ndarray  # int32[G]
    on_device: np.ndarray  # bool[G, C], a holder outside the source wants it there
    on_host: np.ndarray  # bool[G, C]


def make_class_tables(tables: Tables) -> ClassTables:
    """Returns the words of one problem."""
    masks = np.concatenate([tables.device_mask, tables.host_mask], -1).astype("<u4", copy=False)
    words = np.ascontiguousarray(masks).view("<u8")
    fixed = np.packbits(np.concatenate([tables.fixed_device, tables.fixed_host]), bitorder="little")
    return ClassTables(words, fixed.view("<u8"), _digest(words))


def class_patterns(
    classes: ClassTables, candidate: np.ndarray, codes: np.ndarray, cells: Cells
) -> ClassPatterns:
    """Returns the groups of a batch.

    Args:
        candidate: int32[B].
        codes: int32[B, V].
        cells: the same codes in sparse form.
    """
    v, words = len(cells.reference), classes.words
    own = words[np.arange(v), cells.reference]
    middle = np.bitwise_or.reduce(own, axis=0) | classes.fixed
    before = cells.reference[cells.owners]
    moves = classes.digest[cells.owners, cells.codes] != classes.digest[cells.owners, before]
    rows = cells.rows[moves]
    if not len(rows):
        wanted = np.broadcast_to(middle, (len(candidate), len(middle)))
    else:
        wanted = np.repeat(middle[None], len(candidate), 0)
        touched = rows[np.flatnonzero(np.diff(rows, prepend=-1))]
        if len(touched) == len(rows):  # one owner each: everybody else stays with the reference
            owner = cells.owners[moves]
            wanted[rows] = _without_each(own, classes.fixed)[owner] | words[owner, cells.codes[moves]]
        else:
            flat = words.reshape(-1, words.shape[-1])
            at = codes[touched].T + np.arange(v)[:, None] * words.shape[1]
            wanted[touched] = np.bitwise_or.reduce(flat.take(at, 0), axis=0) | classes.fixed
    key = _digest(wanted) * 1023 + candidate
    if (key == key[0]).all():
        first, group = np.zeros(1, np.int64), np.zeros(len(key), np.int64)
    else:
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
    octets = np.ascontiguousarray(wanted[first]).view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, bitorder="little").view(bool)
    c = bits.shape[1] // 2
    return ClassPatterns(group, candidate[first], bits[:, :c], bits[:, c:])


def _without_each(own: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Returns uint64[V, W], the words of all owners but one, for each of them."""
    before, after = np.empty_like(own), np.empty_like(own)
    before[:1], after[-1:] = fixed, 0
    np.bitwise_or.accumulate(own[:-1], axis=0, out=before[1:])
    before[1:] |= fixed
    after[:-1] = np.bitwise_or.accumulate(own[:0:-1], axis=0)[::-1]
    return before | after


def _digest(words: np.ndarray) -> np.ndarray:
    """Returns int64[...] of uint64[..., W], equal for equal words."""
    odd = np.arange(1, words.shape[-1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    mixed = (words ^ (words >> np.uint64(29))) * odd
    mixed ^= mixed >> np.uint64(32)
    return (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(-1, dtype=np.uint64).view(np.int64)
