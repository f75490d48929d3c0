"""A batch of targets as one reference row and the places where a target differs from it.

Owns: that sparse form, and sums over it. The targets of a search differ from each other in few owners, so
what adds over owners is summed once for the reference and corrected at the differences; work follows the
differences, not targets x owners. Exact: integers only.

Letters: B targets, V victims, n differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Cells:
    """Codes int32[B, V] in sparse form. Build with `make_cells`."""

    num_targets: int
    reference: np.ndarray  # int32[V]
    rows: np.ndarray  # int64[n], target, ascending
    owners: np.ndarray  # int64[n], victim
    codes: np.ndarray  # int32[n]
    starts: np.ndarray  # int64[B + 1], where each target's differences begin


def make_cells(codes: np.ndarray) -> Cells:
    """Returns the sparse form of int32[B, V].

    The reference is the majority of three rows, owner by owner: in a neighbourhood that is its centre.
    """
    b = len(codes)
    first, middle, last = codes[0], codes[b // 2], codes[-1]
    low, high = np.minimum(first, last), np.maximum(first, last)
    reference = np.maximum(low, np.minimum(high, middle))
    rows, owners = np.nonzero(codes != reference)
    starts = np.searchsorted(rows, np.arange(b + 1))
    return Cells(b, reference, rows, owners, codes[rows, owners], starts)


def sum_by_target(cells: Cells, changes: np.ndarray) -> np.ndarray:
    """Returns [B, ...], the sums of `changes` [n, ...] over each target's differences, in their own type."""
    if len(cells.rows) == cells.num_targets and (cells.starts[1:] - cells.starts[:-1] == 1).all():
        return changes
    running = np.zeros((len(changes) + 1, *changes.shape[1:]), changes.dtype)
    np.cumsum(changes, axis=0, out=running[1:])
    return running[cells.starts[1:]] - running[cells.starts[:-1]]
