"""Moves 16-bit float pages as integers.

Owns one workaround and nothing else: the CPU compiler of jax 0.10.2 widens a whole bfloat16 pool to float32
around every gather or scatter (measured: 450 ms and twice the pool in temporary memory for 8 rows of a 256
MiB pool). The same bits as uint16 move in place. Elsewhere the bitcasts cost nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax


def bits_of(pages: jax.Array) -> jax.Array:
    """Returns the pages as uint16 if they are 16-bit floats, else unchanged."""
    if pages.dtype in (jnp.bfloat16, jnp.float16):
        return lax.bitcast_convert_type(pages, jnp.uint16)
    return pages


def from_bits(moved: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns what `bits_of` took apart, as `dtype` again."""
    return moved if moved.dtype == dtype else lax.bitcast_convert_type(moved, dtype)


def widened(moved: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns what `bits_of` took apart as float32.

    A bfloat16 is the upper half of a float32, so widening is a shift and no bfloat16 value ever appears.
    """
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(moved.astype(jnp.uint32) << 16, jnp.float32)
    return from_bits(moved, dtype).astype(jnp.float32)
