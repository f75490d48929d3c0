"""Owns the pieces that every layer shares: matrix products, norms, the dense FFN and the rotary embedding.

It owns no mixer (`attention.py`, `gated_delta.py`) and no expert routing (`moe.py`).

Letters: N tokens (any leading shape), H hidden size, F feed-forward width, D head size, Dr rotated
components. All projection weights are stored `[in, out]`: with few rows, the decode case, XLA's CPU products
over that layout were 1.3 to 2 times as fast as over the checkpoint's `[out, in]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ninfer_jax.model.config import Qwen35Config


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """Returns the product precision that keeps `dtype` honest: float32 must not become TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `x @ weight` in the dtype of `x`.

    Args:
        x: [..., in].
        weight: [in, out], the same dtype.
    """
    return jnp.matmul(x, weight, precision=precision_of(x.dtype))


def weight_param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """Returns a zero parameter; `loader` and trainers replace its value, tracing never allocates it."""
    return nnx.Param(jnp.zeros(shape, dtype))


def vector_param(shape: tuple[int, ...]) -> nnx.Param:
    """Returns a float32 parameter, whatever the model dtype.

    Norm gains, decay rates and time steps enter float32 arithmetic, so keeping them there is exact for
    bfloat16 checkpoints and costs nothing; rounding `A_log` and the gated norm to bfloat16 is a known
    accuracy bug elsewhere.
    """
    return nnx.Param(jnp.zeros(shape, jnp.float32))


def rms_norm(x: jax.Array, offset: jax.Array, eps: float) -> jax.Array:
    """Returns `x / rms(x) * (1 + offset)` over the last axis, computed in float32, in the dtype of `x`.

    Args:
        x: [..., D].
        offset: float32[D], stored as the distance from 1.
        eps: added to the mean square.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * (1.0 + offset)).astype(x.dtype)


class OffsetNorm(nnx.Module):
    """RMSNorm whose stored gain is an offset from one; used for every norm but the gated one."""

    def __init__(self, size: int, eps: float) -> None:
        self.offset = vector_param((size,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalised `x` [..., size]."""
        return rms_norm(x, self.offset[...], self.eps)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Returns `silu(gate) * up` for [..., 2F] with the gate in the first half."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


class DenseFFN(nnx.Module):
    """SwiGLU with gate and up fused into one product."""

    def __init__(self, hidden_size: int, width: int, dtype: jnp.dtype) -> None:
        self.gate_up = weight_param((hidden_size, 2 * width), dtype)
        self.down = weight_param((width, hidden_size), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the block's output for `x` [..., H], before the residual."""
        return matmul(swiglu(matmul(x, self.gate_up[...])), self.down[...])


def rotary_rows(config: Qwen35Config) -> np.ndarray:
    """Returns int32[Dr/2]: which position row (0 T, 1 H, 2 W) turns each rotary frequency.

    The rows interleave (T H W T H W ...) until a row's section is used up; whatever is left belongs to T.
    """
    index = np.arange(config.rotary_dim // 2)
    rows = np.zeros(index.size, np.int32)
    for row in (1, 2):
        rows[(index % 3 == row) & (index < 3 * config.mrope_section[row])] = row
    return rows


def rotary_table(config: Qwen35Config, positions: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each [N, Dr/2] in `dtype`; the angles themselves are float32.

    Args:
        config: gives theta, the rotary size and the sections.
        positions: int32[3, N], the T, H and W rows; equal rows are ordinary text positions.
        dtype: the model dtype, in which q and k will be rotated.
    """
    exponent = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / config.rotary_dim
    inverse_frequency = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    angles = positions.astype(jnp.float32)[rotary_rows(config)].T * inverse_frequency
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x` with its first Dr components turned, half against half; the rest passes through.

    Args:
        x: [N, heads, D].
        cos: [N, Dr/2].
        sin: [N, Dr/2].
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)
