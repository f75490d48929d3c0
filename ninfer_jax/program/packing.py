"""Owns the layout of the one int32 array that carries a step's inputs to the device, and both of its ends.

It does not own what the numbers mean. One array per step means one transfer per step; floats travel as their
bits.
Letters: B rows, T tokens of a bucket, W block-table width, C lanes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ninfer_jax.model.sampling import SamplingRows
from ninfer_jax.model.transformer import DecodeBatch, PrefillChunk
from ninfer_jax.program.executor import ZERO_STATE, DecodeInputs, PrefillInputs, TailInputs
from ninfer_jax.program.lane_sampling import LaneSampling

# Columns of a row of a decode or tail step.
_LANE, _TOKEN, _POSITIONS, _LENGTH, _READ_SLOT, _WRITE_SLOT, _STEP, _BAN_EOS = 0, 1, 2, 5, 6, 7, 8, 9
_PARAMS = 10
# Columns of a lane's sampling numbers, within a row from _PARAMS on.
_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION, _TOP_K, _SEED, _NUM_LOGPROBS = range(9)
_NUM_FLOATS = 6
_NUM_PARAMS = 9
ROW_WIDTH = _PARAMS + _NUM_PARAMS  # a decode row has W block-table entries behind these

# Head of a packed prefill chunk: block table, tokens and positions follow.
_START, _NUM_TOKENS, _CHUNK_READ, _CHUNK_WRITE = 0, 1, 2, 3
_CHUNK_HEAD = 4


class LaneParameters:
    """Host copy of every lane's sampling numbers, in the form a step sends them."""

    def __init__(self, num_lanes: int) -> None:
        self._bits = np.zeros((num_lanes, _NUM_PARAMS), np.int32)
        self._min_tokens = np.zeros(num_lanes, np.int32)

    def set(self, lane: int, sampling: LaneSampling) -> None:
        """Replaces one lane's numbers."""
        row = self._bits[lane]
        row.view(np.float32)[:_NUM_FLOATS] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence,
            sampling.frequency,
            sampling.repetition,
        )
        row[_TOP_K] = sampling.top_k
        row.view(np.uint32)[_SEED] = sampling.seed & 0xFFFFFFFF
        row[_NUM_LOGPROBS] = sampling.num_logprobs
        self._min_tokens[lane] = sampling.min_tokens

    def fill(self, packed: np.ndarray, lanes: np.ndarray, steps: np.ndarray) -> None:
        """Writes the sampling columns of every row of a step."""
        packed[:, _LANE] = lanes
        packed[:, _STEP] = steps
        packed[:, _BAN_EOS] = steps < self._min_tokens[lanes]
        packed[:, _PARAMS:ROW_WIDTH] = self._bits[lanes]


def pack_decode(inputs: DecodeInputs, parameters: LaneParameters, num_slots: int) -> np.ndarray:
    """Returns int32[B, ROW_WIDTH + W]; always a new array: the device may still read it later."""
    num_rows, width = inputs.block_tables.shape
    packed = np.empty((num_rows, ROW_WIDTH + width), np.int32)
    parameters.fill(packed, inputs.lanes, inputs.steps)
    packed[:, _TOKEN] = inputs.tokens
    packed[:, _POSITIONS : _POSITIONS + 3] = inputs.positions.T
    packed[:, _LENGTH] = inputs.lengths
    packed[:, _READ_SLOT] = np.where(inputs.read_slots == ZERO_STATE, num_slots, inputs.read_slots)
    packed[:, _WRITE_SLOT] = inputs.write_slots
    # An entry that maps nothing is never read below `lengths`; 0 keeps every index in bounds.
    np.maximum(inputs.block_tables, 0, out=packed[:, ROW_WIDTH:])
    return packed


def unpack_decode(packed: jax.Array) -> tuple[DecodeBatch, SamplingRows]:
    """Returns the model's and the sampler's inputs inside the compiled program."""
    batch = DecodeBatch(
        tokens=packed[:, _TOKEN],
        positions=packed[:, _POSITIONS : _POSITIONS + 3].T,
        block_tables=packed[:, ROW_WIDTH:],
        lengths=packed[:, _LENGTH],
        read_slots=packed[:, _READ_SLOT],
        write_slots=packed[:, _WRITE_SLOT],
    )
    return batch, _unpack_rows(packed)


def pack_tail(inputs: TailInputs, parameters: LaneParameters) -> np.ndarray:
    """Returns int32[B, ROW_WIDTH], a new array."""
    packed = np.zeros((len(inputs.lanes), ROW_WIDTH), np.int32)
    parameters.fill(packed, inputs.lanes, inputs.steps)
    packed[:, _READ_SLOT] = inputs.slots
    return packed


def unpack_tail(packed: jax.Array) -> tuple[jax.Array, SamplingRows]:
    """Returns int32[B] slots and the sampler's inputs inside the compiled program."""
    return packed[:, _READ_SLOT], _unpack_rows(packed)


def pack_prefill(inputs: PrefillInputs, bucket_tokens: int, num_slots: int) -> np.ndarray:
    """Returns int32[4 + W + 4 * T] for one chunk padded on the right to its bucket; a new array."""
    num_tokens, width = len(inputs.tokens), len(inputs.block_table)
    packed = np.zeros(_CHUNK_HEAD + width + 4 * bucket_tokens, np.int32)
    packed[_START] = inputs.start_tokens
    packed[_NUM_TOKENS] = num_tokens
    packed[_CHUNK_READ] = num_slots if inputs.read_slot == ZERO_STATE else inputs.read_slot
    packed[_CHUNK_WRITE] = inputs.write_slot
    np.maximum(inputs.block_table, 0, out=packed[_CHUNK_HEAD : _CHUNK_HEAD + width])
    body = packed[_CHUNK_HEAD + width :].reshape(4, bucket_tokens)
    body[0, :num_tokens] = inputs.tokens
    body[1:, :num_tokens] = inputs.positions
    return packed


def unpack_prefill(packed: jax.Array, width: int) -> PrefillChunk:
    """Returns the model's inputs inside the compiled program."""
    body = packed[_CHUNK_HEAD + width :].reshape(4, -1)
    return PrefillChunk(
        tokens=body[0],
        positions=body[1:],
        block_table=packed[_CHUNK_HEAD : _CHUNK_HEAD + width],
        start_tokens=packed[_START],
        num_tokens=packed[_NUM_TOKENS],
        read_slot=packed[_CHUNK_READ],
        write_slot=packed[_CHUNK_WRITE],
    )


def _unpack_rows(packed: jax.Array) -> SamplingRows:
    params = packed[:, _PARAMS:ROW_WIDTH]
    floats = lax.bitcast_convert_type(params[:, :_NUM_FLOATS], jnp.float32)
    return SamplingRows(
        lanes=packed[:, _LANE],
        temperature=floats[:, _TEMPERATURE],
        top_k=params[:, _TOP_K],
        top_p=floats[:, _TOP_P],
        min_p=floats[:, _MIN_P],
        presence=floats[:, _PRESENCE],
        frequency=floats[:, _FREQUENCY],
        repetition=floats[:, _REPETITION],
        seed=lax.bitcast_convert_type(params[:, _SEED], jnp.uint32),
        step=packed[:, _STEP],
        ban_eos=packed[:, _BAN_EOS] != 0,
        num_logprobs=params[:, _NUM_LOGPROBS],
    )
