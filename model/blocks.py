"""Owns reductions over a vocabulary in blocks of neighbouring tokens: the best token, the best few, the mass.

It does not own what the numbers mean. On a CPU a reduction that carries an index, and a partial sort, run as
scalar code; per-block maxima are vectorised, and afterwards a handful of blocks is all that is left to look
at. Measured at 8 rows of 248,320 on two cores: argmax 1.5 ms for 10, best 64 2.3 ms for 6.

Letters: `B` rows, `V` tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 512

# Up to this width one `lax.top_k` over the row costs no more than the two of the blocked form.
_DIRECT_TOP_K_TOKENS = 8192


def tiled(values: jax.Array, fill: float, block: int = BLOCK_TOKENS) -> jax.Array:
    """Returns the rows cut into blocks, the last one filled up.

    Args:
        values: f32[B, V].
        fill: value of the columns added to make V divisible.
        block: tokens per block.

    Returns:
        f32[B, ceil(V / block), block].
    """
    missing = -values.shape[-1] % block
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)
    return values.reshape(values.shape[0], -1, block)


def block_masses(scores: jax.Array) -> jax.Array:
    """Returns the sum of `exp(score)` over each block.

    Args:
        scores: f32[B, V], at most 0 (the row's maximum already subtracted), -inf where excluded.

    Returns:
        f32[B, ceil(V / BLOCK_TOKENS)].
    """
    return jnp.sum(jnp.exp(tiled(scores, -jnp.inf)), axis=-1)


def row_sums(values: jax.Array) -> jax.Array:
    """Returns each row's sum, added block by block: 248,320 float32 terms lose less than 1e-6 of it.

    Args:
        values: f32[B, V].

    Returns:
        f32[B].
    """
    return jnp.sum(jnp.sum(tiled(values, 0.0), axis=-1), axis=-1)


def first_argmax(values: jax.Array, num_columns: int) -> jax.Array:
    """Returns the lowest index of the maximum among each row's first `num_columns` columns.

    Args:
        values: f32[B, V].
        num_columns: static, from 1 to V.

    Returns:
        int32[B]. A NaN counts as the maximum.
    """
    whole = num_columns // BLOCK_TOKENS
    if whole < 2:
        return jnp.argmax(values[:, :num_columns], axis=-1).astype(jnp.int32)
    border = whole * BLOCK_TOKENS
    tiles = values[:, :border].reshape(values.shape[0], whole, BLOCK_TOKENS)
    chosen = jnp.argmax(jnp.max(tiles, axis=-1), axis=-1)
    inside = jnp.take_along_axis(tiles, chosen[:, None, None], axis=1)[:, 0]
    # The columns after the last whole block join the chosen block's: all of them have higher ids.
    inside = jnp.concatenate([inside, values[:, border:num_columns]], axis=-1)
    place = jnp.argmax(inside, axis=-1)
    head = chosen * BLOCK_TOKENS + place
    return jnp.where(place < BLOCK_TOKENS, head, border + place - BLOCK_TOKENS).astype(jnp.int32)


def leading(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the best `count` scores of each row in order, and their ids.

    Exact, ties to the lower id. A token among the best `count` lies in one of the `count` blocks with the
    best maxima: each of those maxima would otherwise come before it. So the maxima are ranked first, and then
    only the tokens of the chosen blocks, which are put back in id order so that ties among them go to the
    lower id too.

    Args:
        scores: f32[B, V], no NaN.
        count: static, at most V.

    Returns:
        f32[B, count] descending, and int32[B, count]; where fewer than `count` scores are above -inf, the
        last entries are -inf and their ids mean nothing (they may exceed V).
    """
    rows, columns = scores.shape
    # A power of two near sqrt(V / count) makes both rankings about as long.
    block = 1 << (((columns // count).bit_length() - 1) // 2)
    if columns <= _DIRECT_TOP_K_TOKENS or block < 8:
        return lax.top_k(scores, count)
    tiles = tiled(scores, -jnp.inf, block)
    _, blocks = lax.top_k(jnp.max(tiles, axis=-1), count)
    blocks = lax.sort(blocks, dimension=-1)
    inside = jnp.take_along_axis(tiles, blocks[:, :, None], axis=1).reshape(rows, count * block)
    best, place = lax.top_k(inside, count)
    ids = jnp.take_along_axis(blocks, place // block, axis=-1) * block + place % block
    return best, ids
