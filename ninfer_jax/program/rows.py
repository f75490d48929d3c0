"""Owns the execution rows: for each active sequence the numbers that a step sends to the device (K-8).

It does not own pages or sequences: a row only repeats what their books say, in the very form a step takes
it, so that packing a step is one copy and committing it one addition, however many rows run. An inactive
sequence holds no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer_jax.program.row_layout import (
    ADVANCING,
    FLOATS,
    LANE,
    LENGTH,
    MIN_TOKENS,
    NO_PAGE,
    NUM_LOGPROBS,
    POSITIONS,
    READ_SLOT,
    ROW_WIDTH,
    SEED,
    STEP,
    TABLE,
    TOKEN,
    TOP_K,
    WRITE_SLOT,
)
from ninfer_jax.program.slots import SlotPool
from ninfer_jax.sampling_params import LaneSampling


class ExecutionRows:
    """The only holder of the rows; a step runs on copies of them."""

    def __init__(self, num_rows: int, width_pages: int) -> None:
        self.pool = SlotPool("execution rows", num_rows)
        self.numbers = np.zeros((num_rows, ROW_WIDTH + width_pages), np.int32)  # int32[C, ROW_WIDTH + W]
        self.tables = self.numbers[:, TABLE]  # int32[C, W], a view
        self.tables[:] = NO_PAGE

    def lease(self, lane: int, sampling: LaneSampling) -> int:
        """Returns a free row, now leased to a lane; it maps nothing yet."""
        row = self.pool.take()
        numbers = self.numbers[row]
        numbers[LANE] = lane
        numbers[MIN_TOKENS] = sampling.min_tokens
        numbers.view(np.float32)[FLOATS] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence,
            sampling.frequency,
            sampling.repetition,
        )
        numbers[TOP_K] = sampling.top_k
        numbers.view(np.uint32)[SEED] = sampling.seed & 0xFFFFFFFF
        numbers[NUM_LOGPROBS] = sampling.num_logprobs
        return row

    def give_back(self, row: int) -> None:
        """Frees a row and forgets what it mapped."""
        self.pool.give_back(row)
        self.tables[row] = NO_PAGE

    def append(self, row: int, start_page: int, page_ids: Sequence[int]) -> None:
        """Writes the ids of logical pages `start_page`, `start_page + 1`, ... of one row."""
        if page_ids:
            self.tables[row, start_page : start_page + len(page_ids)] = page_ids

    def stand_at(
        self, row: int, *, read_slot: int, write_slot: int, num_tokens: int, position: int, num_drawn: int
    ) -> None:
        """Puts a row behind its last fed token: the state it draws its next token from.

        Args:
            row: leased.
            read_slot: state slot that the next step reads.
            write_slot: state slot that the next step writes.
            num_tokens: KV tokens so far.
            position: of the last fed token, on every axis: generated text moves all axes alike.
            num_drawn: output tokens so far.
        """
        numbers = self.numbers[row]
        numbers[READ_SLOT], numbers[WRITE_SLOT] = read_slot, write_slot
        numbers[POSITIONS:LENGTH] = position
        numbers[LENGTH], numbers[STEP] = num_tokens, num_drawn

    def copy(self, rows: Sequence[int]) -> np.ndarray:
        """Returns int32[B, ROW_WIDTH + W] of these rows; new memory, which the device may read later."""
        return self.numbers.take(rows, axis=0)

    def advance(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes one committed output token into each of these rows: the next step feeds it.

        Args:
            rows: int[B], distinct.
            tokens: int[B].
        """
        index = np.array(rows)
        self.numbers[index, TOKEN] = tokens
        self.numbers[index, ADVANCING] += 1
