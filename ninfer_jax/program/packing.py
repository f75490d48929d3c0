"""Owns the arrays that carry a step's inputs to the device and its results back, and their device ends.

One array each way means one transfer each way; floats travel as their bits. It does not own the columns of a
row (`row_layout`) nor the rows (`rows`).
Letters: B rows, T tokens of a bucket, W block-table width, K reported alternatives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ninfer_jax.model.sampling import MAX_LOGPROBS, Sampled, SamplingRows
from ninfer_jax.model.transformer import DecodeBatch, PrefillChunk
from ninfer_jax.program.executor import ZERO_STATE, Logprobs, PrefillInputs
from ninfer_jax.program.row_layout import (
    FLOATS,
    FREQUENCY,
    LANE,
    MIN_P,
    MIN_TOKENS,
    NUM_LOGPROBS,
    PRESENCE,
    PROMPT_TOKENS,
    READ_SLOT,
    REPETITION,
    ROPE_DELTA,
    SEED,
    STEP,
    TABLE,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    WRITE_SLOT,
)

# Head of a packed prefill chunk: block table, tokens and positions follow.
_START, _NUM_TOKENS, _CHUNK_READ, _CHUNK_WRITE = 0, 1, 2, 3
_CHUNK_HEAD = 4

# Columns of a packed result.
_DRAWN, _LOGPROB = 0, 1
_TOP_IDS = slice(2, 2 + MAX_LOGPROBS)
_TOP_LOGPROBS = slice(2 + MAX_LOGPROBS, 2 + 2 * MAX_LOGPROBS)
RESULT_WIDTH = 2 + 2 * MAX_LOGPROBS


def unpack_decode(rows: jax.Array) -> tuple[DecodeBatch, SamplingRows]:
    """Returns the model's and the sampler's inputs of int32[B, ROW_WIDTH + W] inside the compiled program."""
    lengths = rows[:, PROMPT_TOKENS] + rows[:, STEP]
    positions = lengths - 1 + rows[:, ROPE_DELTA]
    batch = DecodeBatch(
        tokens=rows[:, TOKEN],
        positions=jnp.broadcast_to(positions, (3, len(rows))),  # generated text moves all axes alike
        # An entry that maps nothing is never read below `lengths`; 0 keeps every index in bounds.
        block_tables=jnp.maximum(rows[:, TABLE], 0),
        lengths=lengths,
        read_slots=rows[:, READ_SLOT],
        write_slots=rows[:, WRITE_SLOT],
    )
    return batch, _sampling_rows(rows)


def unpack_tail(rows: jax.Array) -> tuple[jax.Array, SamplingRows]:
    """Returns int32[B] slots and the sampler's inputs inside the compiled program."""
    return rows[:, READ_SLOT], _sampling_rows(rows)


def _sampling_rows(rows: jax.Array) -> SamplingRows:
    def as_float(column: int) -> jax.Array:
        return floats[:, column - TEMPERATURE]

    floats = lax.bitcast_convert_type(rows[:, FLOATS], jnp.float32)
    return SamplingRows(
        lanes=rows[:, LANE],
        temperature=as_float(TEMPERATURE),
        top_k=rows[:, TOP_K],
        top_p=as_float(TOP_P),
        min_p=as_float(MIN_P),
        presence=as_float(PRESENCE),
        frequency=as_float(FREQUENCY),
        repetition=as_float(REPETITION),
        seed=lax.bitcast_convert_type(rows[:, SEED], jnp.uint32),
        step=rows[:, STEP],
        ban_eos=rows[:, STEP] < rows[:, MIN_TOKENS],
        num_logprobs=rows[:, NUM_LOGPROBS],
    )


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


def pack_sampled(sampled: Sampled) -> jax.Array:
    """Returns int32[B, RESULT_WIDTH] of a draw inside the compiled program."""

    def bits(floats: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(floats, jnp.int32)

    return jnp.concatenate(
        [
            sampled.tokens[:, None],
            bits(sampled.logprob)[:, None],
            sampled.top_ids,
            bits(sampled.top_logprobs),
        ],
        axis=1,
    )


def unpack_tokens(result: np.ndarray) -> np.ndarray:
    """Returns int32[B], the drawn tokens of a packed result on the host."""
    return result[:, _DRAWN]


def unpack_logprobs(result: np.ndarray) -> Logprobs:
    """Returns the log-probabilities of a packed result on the host."""
    floats = result.view(np.float32)
    return Logprobs(drawn=floats[:, _LOGPROB], top_ids=result[:, _TOP_IDS], top=floats[:, _TOP_LOGPROBS])
