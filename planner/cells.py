"""A batch of targets as one reference row and the places where a target differs from it.

Owns: that sparse form, and sums over it. The targets of a search differ from each other in few owners, so
what adds over owners is summed once for the reference and corrected at the differences; work follows the
differences, not targets x owners. Exact: integers only.

Letters: B targets, V victims, n differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

SCATTERED: Final = 4  # neighbours differ from their reference in less than one owner of so many


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
    """Returns the sparse form of int32[B, V]."""
    reference = _reference(codes)
    rows, owners = np.nonzero(codes != reference)
    starts = np.searchsorted(rows, np.arange(len(codes) + 1))
    return Cells(len(codes), reference, rows, owners, codes[rows, owners], starts)


def are_scattered(codes: np.ndarray) -> bool:
    """Returns whether the targets of int32[B, V] are no neighbours: the sparse form would not pay."""
    return int(np.count_nonzero(codes != _reference(codes))) * SCATTERED > codes.size


def _reference(codes: np.ndarray) -> np.ndarray:
    """Returns the majority of three rows, owner by owner: in a neighbourhood that is its centre."""
    first, middle, last = codes[0], codes[len(codes) // 2], codes[-1]
    low, high = np.minimum(first, last), np.maximum(first, last)
    return np.maximum(low, np.minimum(high, middle))


def sum_by_target(cells: Cells, changes: np.ndarray) -> np.ndarray:
    """Returns [B, ...], the sums of `changes` [n, ...] over each target's differences, in their own type."""
    if len(cells.rows) == cells.num_targets and (cells.starts[1:] - cells.starts[:-1] == 1).all():
        return changes
    running = np.zeros((len(changes) + 1, *changes.shape[1:]), changes.dtype)
    np.cumsum(changes, axis=0, out=running[1:])
    return running[cells.starts[1:]] - running[cells.starts[:-1]]
