"""Owns the execution rows: the host copy of every block table, one row per active address space (K-8).

It does not own pages: a row only repeats which ids its address space has mapped, and an inactive one holds no
row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer_jax.program.slots import SlotPool

# An entry that maps nothing. The executor never sends it to the device as an index.
NO_PAGE = -1


class ExecutionRows:
    """The only holder of the block tables; a step reads copies of the rows it runs."""

    def __init__(self, num_rows: int, width_pages: int) -> None:
        self.pool = SlotPool("execution rows", num_rows)
        self.tables = np.full((num_rows, width_pages), NO_PAGE, np.int32)  # int32[C, W]

    def lease(self) -> int:
        """Returns a free row, now leased; it maps nothing yet."""
        return self.pool.take()

    def give_back(self, row: int) -> None:
        """Frees a row and forgets what it mapped."""
        self.pool.give_back(row)
        self.tables[row] = NO_PAGE

    def append(self, row: int, start_page: int, page_ids: Sequence[int]) -> None:
        """Writes the ids of logical pages `start_page`, `start_page + 1`, ... of one row."""
        if page_ids:
            self.tables[row, start_page : start_page + len(page_ids)] = page_ids
