"""Owns the columns of an execution row: the int32 numbers that one sequence sends with a step.

It does not own the array (`rows`) nor its device end (`packing`). One array per step means one transfer per
step; floats travel as their bits. The block table, W entries, lies behind these columns.
"""

from __future__ import annotations

# Fixed from activation on. With the output index of the token being drawn they say where a step stands: the
# KV length is PROMPT_TOKENS + STEP; the fed token lies at the last index plus ROPE_DELTA, on every axis.
LANE, READ_SLOT, WRITE_SLOT, PROMPT_TOKENS, ROPE_DELTA = range(5)

# Also fixed: the lane's sampling numbers, the first six floats.
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, TOP_K, SEED, NUM_LOGPROBS, MIN_TOKENS = range(
    5, 15
)
FLOATS = slice(TEMPERATURE, TOP_K)

# Written by every commit: the token that the next step feeds, and the output index that it draws.
TOKEN, STEP = 15, 16

ROW_WIDTH = 17
TABLE = slice(ROW_WIDTH, None)

# A block-table entry that maps nothing. It is never used as an index: see `packing.unpack_decode`.
NO_PAGE = -1
