"""Owns the gated full-attention mixer: projections, head norms, rotation, output gate.

It owns no KV memory and no attention algorithm: paged attention is `kernels/paged_attention.py`; only the
cacheless attention of training and research lives here, because it needs a gradient.

Letters: N tokens, T tokens of one sequence, Hq/Hkv query and key/value heads, G = Hq/Hkv, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.layers import OffsetNorm, matmul, precision_of, rotate, weight_param


class QueryKeyValue(NamedTuple):
    """The heads of one full-attention layer for some tokens."""

    q: jax.Array  # [N, Hq, D], normed and rotated
    k: jax.Array  # [N, Hkv, D], normed and rotated
    v: jax.Array  # [N, Hkv, D]
    gate: jax.Array  # [N, Hq * D], before the sigmoid


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """Returns [T, Hq, D], plain causal attention of one sequence over itself, differentiable, O(T^2) memory.

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        scale: factor of the scores.
    """
    tokens, heads, dim = q.shape
    groups = q.reshape(tokens, k.shape[1], -1, dim)
    precision = precision_of(q.dtype)
    scores = jnp.einsum("thgd,shd->hgts", groups, k, precision=precision).astype(jnp.float32) * scale
    index = jnp.arange(tokens)
    scores = jnp.where(index[None, :] <= index[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("hgts,shd->thgd", weights, v, precision=precision).reshape(tokens, heads, dim)


class GatedAttention(nnx.Module):
    """The full-attention mixer of one layer."""

    def __init__(self, config: Qwen35Config, dtype: jnp.dtype) -> None:
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        # columns: q | gate | k | v; the checkpoint's per-head pairs of q and gate are undone at load
        self.qkv = weight_param((config.hidden_size, 2 * queries + 2 * keys), dtype)
        self.q_norm = OffsetNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = OffsetNorm(config.head_dim, config.rms_norm_eps)
        self.out_proj = weight_param((queries, config.hidden_size), dtype)

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.config.head_dim**-0.5

    def project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> QueryKeyValue:
        """Returns the heads of `x` [N, H] at the positions of the rotary table ([N, Dr/2] each)."""
        config = self.config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        both = matmul(x, self.qkv[...])

        def heads(start: int, stop: int) -> jax.Array:
            return both[:, start:stop].reshape(x.shape[0], -1, config.head_dim)

        q = rotate(self.q_norm(heads(0, queries)), cos, sin)
        k = rotate(self.k_norm(heads(2 * queries, 2 * queries + keys)), cos, sin)
        v = heads(2 * queries + keys, 2 * queries + 2 * keys)
        return QueryKeyValue(q, k, v, both[:, queries : 2 * queries])

    def finish(self, attended: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns the layer's output [N, H] from the attention output [N, Hq, D] and the gate."""
        return matmul(attended.reshape(gate.shape) * jax.nn.sigmoid(gate), self.out_proj[...])
