"""Owns the randomness of sampling: a counter-based generator and the Gumbel draws made from it.

It does not own which tokens a draw may choose (`model.truncation`) nor their scores (`model.sampling`).

Why counters and not `jax.random`: the noise of one token is a function of (seed, output index, token id)
alone. So it can be had for any handful of ids without making a vocabulary's worth, it is the same in every
lane and batch size, and a jax release with another default generator cannot change what a seed means. The
generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011).

Why Gumbel-max and not one uniform through the inverse CDF: it needs no running sum in float32, whose rounding
over 248,320 terms is larger than a tail token's probability, and a change of 1e-6 in the logits (another
batch size, a restored state) moves only a draw that was almost tied, where a CDF moves every border above the
change.

Letters: `B` rows, `V` tokens, `N` noise values per row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.model.blocks import block_masses, tiled

# A chosen block and a chosen token must not share noise; the second key word keeps their streams apart.
TOKEN_STREAM = 1
BLOCK_STREAM = 2

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(
    key0: jax.Array, key1: jax.Array, counter0: jax.Array, counter1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the two 32-bit words that Threefry-2x32-20 makes of a key and a counter.

    Args:
        key0: uint32, any shape that broadcasts with the others.
        key1: uint32.
        counter0: uint32.
        counter1: uint32.

    Returns:
        Two uint32 arrays of the common shape.
    """
    schedule = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    word0, word1 = counter0 + schedule[0], counter1 + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            word0 = word0 + word1
            word1 = (word1 << jnp.uint32(rotation)) | (word1 >> jnp.uint32(32 - rotation))
            word1 = word1 ^ word0
        word0 = word0 + schedule[(group + 1) % 3]
        word1 = word1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return word0, word1


def gumbel(seed: jax.Array, step: jax.Array, index: jax.Array, stream: int) -> jax.Array:
    """Returns standard Gumbel noise that depends on (seed, step, index, stream) and on nothing else.

    All 64 bits go into the uniform near 0, where the largest noise comes from. With the 23 bits of a plain
    float uniform, one draw in a hundred over 248,320 equal logits would end in a tie, and ties go to the
    lower id.

    Args:
        seed: uint32[B].
        step: int32[B], output index of the token being drawn.
        index: int32[B, N], token or block ids.
        stream: `TOKEN_STREAM` or `BLOCK_STREAM`.

    Returns:
        f32[B, N], finite.
    """
    high, low = threefry(
        seed.astype(jnp.uint32)[:, None],
        jnp.uint32(stream),
        index.astype(jnp.uint32),
        step.astype(jnp.uint32)[:, None],
    )
    uniform = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) + 1.0) * 2.0**-64
    # 1 - 2^-24 is the last float32 below 1; at 1 the noise would be -inf, and a lone candidate could lose.
    uniform = jnp.minimum(uniform, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def draw_listed(
    scores: jax.Array, ids: jax.Array, seed: jax.Array, step: jax.Array, *, stream: int = TOKEN_STREAM
) -> jax.Array:
    """Returns one id of each row's list, drawn with probability proportional to `exp(score)`.

    Args:
        scores: f32[B, N], -inf for entries that must not be drawn; at least one is finite.
        ids: int32[B, N], distinct within a row.
        seed: uint32[B].
        step: int32[B].
        stream: what the ids count, `TOKEN_STREAM` or `BLOCK_STREAM`.

    Returns:
        int32[B], entries of `ids`.
    """
    noisy = scores + gumbel(seed, step, ids, stream)
    return jnp.take_along_axis(ids, jnp.argmax(noisy, axis=-1)[:, None], axis=-1)[:, 0]


def draw_block(scores: jax.Array, seed: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of one block per row, the block drawn by its share of the row's `exp(score)`.

    A token drawn from the result by `draw_listed` has its own probability, P(block) P(token | block), for 485
    + 512 noise values where the flat form takes 248,320 (60 ms for 8 rows on two cores, most of it integer
    mixing).

    Args:
        scores: f32[B, V], at most 0 with maximum 0, -inf for tokens that must not be drawn.
        seed: uint32[B].
        step: int32[B].

    Returns:
        f32[B, N] scores of the block's tokens and int32[B, N] their ids, N = `BLOCK_TOKENS`.
    """
    masses = block_masses(scores)
    blocks = jnp.broadcast_to(jnp.arange(masses.shape[-1], dtype=jnp.int32), masses.shape)
    chosen = draw_listed(jnp.log(masses), blocks, seed, step, stream=BLOCK_STREAM)
    tiles = tiled(scores, -jnp.inf)
    inside = jnp.take_along_axis(tiles, chosen[:, None, None], axis=1)[:, 0]
    return inside, chosen[:, None] * tiles.shape[-1] + jnp.arange(tiles.shape[-1], dtype=jnp.int32)
