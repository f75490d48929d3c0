"""Owns the Gated DeltaNet mixer: its projections, short convolution and delta rule, stepwise and chunked.

It owns no state: recurrent and convolution state come in as arguments and go out as results. Which slot they
live in is `transformer.py`'s business.

Letters: B rows, T tokens, N chunks, C chunk length, Hk/Hv key and value heads, R = Hv/Hk, Dk/Dv head sizes,
M convolution channels (queries, keys, values), K convolution width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.layers import matmul, vector_param, weight_param

CHUNK_TOKENS = 64
# The width of block up to which the chunk's inverse is made by one rolled loop.
_ROLLED_TOKENS = 16
# Part of the model, not of the config: the reference uses this constant inside its L2 norm.
_L2_EPS = 1e-6
_EXACT = lax.Precision.HIGHEST


class Projected(NamedTuple):
    """What one linear layer computes from its input before any state is read."""

    mixed: jax.Array  # [..., M] raw queries, keys and values, before the convolution
    z: jax.Array  # [..., Hv, Dv] output gate
    beta: jax.Array  # f32[..., Hv] write strength
    g: jax.Array  # f32[..., Hv] log decay, <= 0


def l2_normalise(x: jax.Array) -> jax.Array:
    """Returns float32 `x` scaled to unit length; the epsilon is constant, on the squared length."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)


def gated_rms_norm(x: jax.Array, z: jax.Array, gain: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """Returns `norm(x) * gain * silu(z)` per value head in `dtype`: norm first, gate after, plain gain.

    Args:
        x: f32[..., Hv, Dv], the delta rule's output.
        z: [..., Hv, Dv].
        gain: f32[Dv].
        eps: added to the mean square.
        dtype: the model dtype; rounding to it before the gain is what the reference does.
    """
    x = x.astype(dtype).astype(jnp.float32)
    unit = (x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)).astype(dtype)
    return (gain * unit.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(dtype)


def recurrent_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (output f32[B, Hv, Dv], new state) of one token of each row.

    Decay first, then the delta against the decayed state, then the read.

    Args:
        q: f32[B, Hk, Dk], normalised and scaled.
        k: f32[B, Hk, Dk], normalised.
        v: f32[B, Hv, Dv].
        beta: f32[B, Hv].
        g: f32[B, Hv].
        state: f32[B, Hv, Dk, Dv].
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = jnp.repeat(q, repeats, axis=1), jnp.repeat(k, repeats, axis=1)
    # Sums of products instead of batched products: one pass over the state each, which XLA fuses on every
    # backend.
    decayed = state * jnp.exp(g)[..., None, None]
    delta = beta[..., None] * (v - jnp.sum(decayed * k[..., None], axis=2))
    state = decayed + k[..., None] * delta[..., None, :]
    return jnp.sum(state * q[..., None], axis=2), state


def inverse_unit_lower(strict: jax.Array) -> jax.Array:
    """Returns the inverse of `I + strict`, `strict` strictly lower triangular f32[..., C, C], C = 16 * 2^n.

    Pairs of diagonal blocks are merged, from width 1 up: the corner of a merged inverse is the product of the
    one block's inverse, what lies between them, and the other's. Up to `_ROLLED_TOKENS` one rolled loop does
    that with masks: its products are small at any rate, and unrolled they took twice as long to compile.
    (A Neumann series over the whole chunk would go through powers of 1e18.) `lax.linalg.triangular_solve` is
    10 to 30 times slower on CPU, and hung when many batches of it ran in one program (jaxlib 0.10.2).
    """
    size = strict.shape[-1]

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision=_EXACT)

    def diagonal(width: int) -> jax.Array:  # [..., C/width, width, width]
        starts = range(0, size, width)
        return jnp.stack([strict[..., i : i + width, i : i + width] for i in starts], axis=-3)

    width = _ROLLED_TOKENS
    block = diagonal(width)
    index = np.arange(width)
    # By merge: the entries between the two blocks of each pair, block numbers 2n + 1 (row) and 2n (column).
    blocks = index // (1 << np.arange(width.bit_length() - 1))[:, None]
    between = (blocks[:, :, None] == blocks[:, None, :] + 1) & (blocks[:, :, None] % 2 == 1)

    def merge(inverse: jax.Array, between: jax.Array) -> tuple[jax.Array, None]:
        corner = product(inverse, product(jnp.where(between, block, 0.0), inverse))
        return inverse - corner, None

    identity = jnp.broadcast_to(jnp.eye(width, dtype=strict.dtype), block.shape)
    inverse, _ = lax.scan(merge, identity, jnp.asarray(between))
    while width < size:
        below = diagonal(2 * width)[..., width:, :width]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -product(lower, product(below, upper))
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]


def chunked_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (output f32[T, Hv, Dv], new state) of T tokens of one sequence.

    Equal to T applications of `recurrent_rule` up to rounding. Tokens with beta = 0 and g = 0 leave the state
    as it is, so right padding is exact.

    Args:
        q: f32[T, Hk, Dk], normalised and scaled.
        k: f32[T, Hk, Dk], normalised.
        v: f32[T, Hv, Dv].
        beta: f32[T, Hv].
        g: f32[T, Hv].
        state: f32[Hv, Dk, Dv].
    """
    num_tokens, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    repeats = value_heads // key_heads
    length = CHUNK_TOKENS
    num_chunks = -(-num_tokens // length)

    def chunks(x: jax.Array, *heads: int) -> jax.Array:  # [T, heads, ...] -> [N, *heads, C, ...]
        x = jnp.pad(x, ((0, num_chunks * length - num_tokens),) + ((0, 0),) * (x.ndim - 1))
        x = x.reshape(num_chunks, length, *heads, *x.shape[2:])
        return jnp.moveaxis(x, 1, 1 + len(heads))

    q, k = chunks(q, key_heads), chunks(k, key_heads)  # [N, Hk, C, Dk]
    v = chunks(v, key_heads, repeats)  # [N, Hk, R, C, Dv]
    beta, g = chunks(beta, key_heads, repeats), chunks(g, key_heads, repeats)  # [N, Hk, R, C]

    row, column = jnp.arange(length)[:, None], jnp.arange(length)
    # A running sum as a product: cumsum unfolds into dozens of small kernels on CPU, all to be compiled per
    # layer.
    total = jnp.matmul(g, (row <= column).astype(jnp.float32), precision=_EXACT)
    # The difference is masked before exp: as a product of exponentials it would overflow for strongly
    # decaying heads.
    difference = jnp.where(column <= row, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(difference)  # [N, Hk, R, C, C], lower triangular with a unit diagonal

    keys_keys = jnp.einsum("nhid,nhjd->nhij", k, k, precision=_EXACT)
    queries_keys = jnp.einsum("nhid,nhjd->nhij", q, k, precision=_EXACT)
    coupling = jnp.where(column < row, beta[..., None] * keys_keys[:, :, None] * decay, 0.0)
    grown = jnp.exp(total)[..., None]  # [N, Hk, R, C, 1]
    shrinking = jnp.exp(total[..., -1:] - total)[..., None]
    targets = beta[..., None] * jnp.concatenate([v, k[:, :, None] * grown], axis=-1)
    # One batch axis: with three, XLA transposes around every small product.
    inverse = inverse_unit_lower(coupling.reshape(-1, length, length)).reshape(coupling.shape)
    solved = jnp.matmul(inverse, targets, precision=_EXACT)

    inputs = (
        solved[..., :value_dim],
        solved[..., value_dim:],
        q[:, :, None] * grown,
        queries_keys[:, :, None] * decay,
        k[:, :, None] * shrinking,
        jnp.exp(total[..., -1]),
    )

    def advance(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, keys, queries, scores, writes, kept = chunk
        values = values - jnp.matmul(keys, state, precision=_EXACT)
        out = jnp.matmul(queries, state, precision=_EXACT) + jnp.matmul(scores, values, precision=_EXACT)
        update = jnp.matmul(jnp.swapaxes(writes, -1, -2), values, precision=_EXACT)
        return state * kept[..., None, None] + update, out

    state = state.reshape(key_heads, repeats, key_dim, value_dim)
    state, out = lax.scan(advance, state, inputs)  # out [N, Hk, R, C, Dv]
    out = jnp.moveaxis(out, 3, 1).reshape(num_chunks * length, value_heads, value_dim)[:num_tokens]
    return out, state.reshape(value_heads, key_dim, value_dim)


class GatedDeltaNet(nnx.Module):
    """The linear-attention mixer of one layer."""

    def __init__(self, config: Qwen35Config, dtype: jnp.dtype) -> None:
        self.config = config
        width = config.conv_channels + config.linear_value_width + 2 * config.linear_num_value_heads
        self.in_proj = weight_param((config.hidden_size, width), dtype)  # columns: mixed | z | b | a
        self.conv = weight_param(
            (config.linear_conv_kernel_dim, config.conv_channels), dtype
        )  # newest tap last
        self.a_log = vector_param((config.linear_num_value_heads,))
        self.dt_bias = vector_param((config.linear_num_value_heads,))
        self.norm = vector_param((config.linear_value_head_dim,))
        self.out_proj = weight_param((config.linear_value_width, config.hidden_size), dtype)

    def project(self, x: jax.Array) -> Projected:
        """Returns the projections of `x` [..., H]."""
        config = self.config
        heads, channels, values = (
            config.linear_num_value_heads,
            config.conv_channels,
            config.linear_value_width,
        )
        both = matmul(x, self.in_proj[...])
        z = both[..., channels : channels + values].reshape(
            *x.shape[:-1], heads, config.linear_value_head_dim
        )
        b = both[..., channels + values : channels + values + heads]
        a = both[..., channels + values + heads :].astype(jnp.float32)
        g = -jnp.exp(self.a_log[...]) * jax.nn.softplus(a + self.dt_bias[...])
        return Projected(both[..., :channels], z, jax.nn.sigmoid(b).astype(jnp.float32), g)

    def heads(self, convolved: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns float32 (q, k, v) heads of the activated convolution [..., M]; q, k unit, q scaled."""
        config = self.config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        lead = convolved.shape[:-1]
        qk = convolved[..., : 2 * keys].reshape(
            *lead, 2, config.linear_num_key_heads, config.linear_key_head_dim
        )
        qk = l2_normalise(qk)
        v = convolved[..., 2 * keys :].reshape(
            *lead, config.linear_num_value_heads, config.linear_value_head_dim
        )
        scale = config.linear_key_head_dim**-0.5
        return qk[..., 0, :, :] * scale, qk[..., 1, :, :], v.astype(jnp.float32)

    def finish(self, core: jax.Array, z: jax.Array) -> jax.Array:
        """Returns the layer's output [..., H] from the delta rule's output [..., Hv, Dv] and the gate."""
        gated = gated_rms_norm(core, z, self.norm[...], self.config.rms_norm_eps, z.dtype)
        return matmul(gated.reshape(*gated.shape[:-2], -1), self.out_proj[...])

    def step(
        self, x: jax.Array, recurrent: jax.Array, conv: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (output [B, H], recurrent, conv) after one token of each row.

        Args:
            x: [B, H].
            recurrent: f32[B, Hv, Dk, Dv].
            conv: [B, M, K-1], oldest first.
        """
        p = self.project(x)
        window = jnp.concatenate([conv, p.mixed[..., None]], axis=-1)  # [B, M, K]
        taps = self.conv[...].T.astype(jnp.float32)
        convolved = jnp.sum(window.astype(jnp.float32) * taps, axis=-1).astype(x.dtype)
        q, k, v = self.heads(jax.nn.silu(convolved))
        core, recurrent = recurrent_rule(q, k, v, p.beta, p.g, recurrent)
        return self.finish(core, p.z), recurrent, window[..., 1:]

    def chunk(
        self, x: jax.Array, recurrent: jax.Array, conv: jax.Array, num_tokens: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (output [T, H], recurrent, conv) after the first `num_tokens` of T tokens of one sequence.

        Args:
            x: [T, H]; rows from `num_tokens` on are padding and touch no state.
            recurrent: f32[Hv, Dk, Dv].
            conv: [M, K-1], oldest first.
            num_tokens: int32[], at most T.
        """
        p = self.project(x)
        width, tokens = self.config.linear_conv_kernel_dim, x.shape[0]
        history = jnp.concatenate([conv.T, p.mixed], axis=0)  # [K-1+T, M]
        taps = self.conv[...].astype(jnp.float32)
        wide = history.astype(jnp.float32)
        convolved = jnp.zeros((tokens, self.config.conv_channels), jnp.float32)
        for j in range(width):
            convolved = convolved + wide[j : j + tokens] * taps[j]
        q, k, v = self.heads(jax.nn.silu(convolved.astype(x.dtype)))
        valid = (jnp.arange(tokens) < num_tokens)[:, None]
        beta, g = jnp.where(valid, p.beta, 0.0), jnp.where(valid, p.g, 0.0)
        core, recurrent = chunked_rule(q, k, v, beta, g, recurrent)
        # The window of the next token ends at the last valid one, wherever the padding starts.
        conv = lax.dynamic_slice_in_dim(history, num_tokens, width - 1, axis=0).T
        return self.finish(core, p.z), recurrent, conv
