"""Targets: a candidate plus one option code for every victim owner (T-1, T-7).

Owns: the batch of codes and the fixed codes KEEP, ABSENT, EVICT. What the other codes mean is in
`options`; what a target does is in `projection`.

Letters: B targets, V victim rows of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import jax
import numpy as np

KEEP: Final = 0  # the owner stays exactly as it is
ABSENT: Final = 1  # the owner is the candidate's source: structurally no victim (G-8)
EVICT: Final = 2  # the whole owner goes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TargetBatch:
    """B complete targets as one struct of arrays. Row b is target b; a batch of one is a target."""

    candidate: np.ndarray  # int32[B], index into the problem's candidates
    codes: np.ndarray  # int32[B, V], option of each victim row

    def __len__(self) -> int:
        return len(self.candidate)


def make_targets(candidate: np.ndarray | int, codes: np.ndarray) -> TargetBatch:
    """Returns a batch from codes int[B, V] (or one row int[V]) and one candidate index each (or for all)."""
    codes = np.atleast_2d(np.asarray(codes, np.int32))
    which = np.broadcast_to(np.asarray(candidate, np.int32), (len(codes),)).copy()
    return TargetBatch(which, codes)


def take(targets: TargetBatch, rows: np.ndarray | slice) -> TargetBatch:
    """Returns the targets of `rows` (indices, a mask or a slice)."""
    return TargetBatch(targets.candidate[rows], targets.codes[rows])


def concatenate(batches: list[TargetBatch]) -> TargetBatch:
    """Returns all targets of the batches, in order."""
    return TargetBatch(
        np.concatenate([b.candidate for b in batches]), np.concatenate([b.codes for b in batches])
    )


def target_keys(targets: TargetBatch) -> list[bytes]:
    """Returns one hashable key per target; equal targets have equal keys (a search's visited set)."""
    packed = np.concatenate([targets.candidate[:, None], targets.codes], 1).astype(np.int16)
    return [row.tobytes() for row in packed]
