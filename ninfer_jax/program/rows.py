"""Owns the execution rows: for each active sequence the numbers that a step sends to the device (K-8).

It does not own pages or sequences: a row only repeats what their books say, in the very form a step takes
it, so that packing a step is one copy, however many rows run. An inactive sequence holds no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer_jax.program.row_layout import (
    FLOATS,
    LANE,
    MIN_TOKENS,
    NO_PAGE,
    NUM_LOGPROBS,
    PROMPT_TOKENS,
    READ_SLOT,
    ROPE_DELTA,
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

    def lease(
        self, *, lane: int, state_slot: int, prompt_tokens: int, rope_delta: int, sampling: LaneSampling
    ) -> int:
        """Returns a free row, now leased; it maps nothing yet and has drawn nothing.

        Args:
            lane: whose sampler arrays its draws read.
            state_slot: read and written by every step after the prompt.
            prompt_tokens: length of the prompt.
            rope_delta: position of a generated token minus its index.
            sampling: the lane's numbers.
        """
        row = self.pool.take()
        numbers = self.numbers[row]
        numbers[LANE] = lane
        numbers[READ_SLOT] = numbers[WRITE_SLOT] = state_slot
        numbers[PROMPT_TOKENS], numbers[ROPE_DELTA] = prompt_tokens, rope_delta
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
        numbers[MIN_TOKENS] = sampling.min_tokens
        numbers[TOKEN] = numbers[STEP] = 0
        return row

    def give_back(self, row: int) -> None:
        """Frees a row and forgets what it mapped."""
        self.pool.give_back(row)
        self.tables[row] = NO_PAGE

    def append(self, row: int, start_page: int, page_ids: Sequence[int]) -> None:
        """Writes the ids of logical pages `start_page`, `start_page + 1`, ... of one row."""
        if page_ids:
            self.tables[row, start_page : start_page + len(page_ids)] = page_ids

    def feed_next(self, row: int, token: int, step: int) -> None:
        """Says what the row's next step feeds and draws.

        Args:
            row: leased.
            token: the newest committed output token.
            step: output tokens committed so far, the index of the one to draw.
        """
        numbers = self.numbers
        numbers[row, TOKEN] = token  # two plain stores: for a few rows they beat any indexing by array
        numbers[row, STEP] = step

    def copy(self, rows: Sequence[int]) -> np.ndarray:
        """Returns int32[B, ROW_WIDTH + W] of these rows; new memory, which the device may read later."""
        return self.numbers.take(rows, axis=0)
