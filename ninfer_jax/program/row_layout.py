"""Owns the columns of an execution row: the int32 numbers that one sequence sends with a step.

It does not own the array (`rows`) nor its device end (`packing`). One array per step means one transfer per
step; floats travel as their bits. The block table, W entries, lies behind these columns.
"""

from __future__ import annotations

# Fixed while a sequence holds its row.
LANE, READ_SLOT, WRITE_SLOT, MIN_TOKENS = 0, 1, 2, 3

# What the next step feeds, and where it stands: three position axes, KV tokens including the fed one, and the
# output index of the token being drawn.
TOKEN, POSITIONS, LENGTH, STEP = 4, 5, 8, 9
ADVANCING = slice(POSITIONS, STEP + 1)  # each grows by one with every committed output token

# The lane's sampling numbers; the first six are floats.
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, TOP_K, SEED, NUM_LOGPROBS = range(10, 19)
FLOATS = slice(TEMPERATURE, TOP_K)

ROW_WIDTH = 19
TABLE = slice(ROW_WIDTH, None)

# A block-table entry that maps nothing. It is never used as an index: see `packing.unpack_decode`.
NO_PAGE = -1
