"""Owns the shapes and sizes of the memory a running model needs: KV page pools and state slots.

It owns no allocation policy: which page or slot is whose is the program's business.

Letters: P pages, Hkv KV heads, D head size, S slots, Hv/Dk/Dv heads and sizes of the linear layers, M
convolution channels, K convolution width, H hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ninfer_jax.model.config import Qwen35Config

# One page is one 64 x D tile of the tensor-core instruction: smaller pages do not compile, larger ones spill.
PAGE_TOKENS = 64


@dataclass(frozen=True)
class CacheSpec:
    """What one page group and one state slot consist of. Hashable, no arrays."""

    kv_dtype: str  # of pages, convolution state and tail; the recurrent state is always float32
    num_full_layers: int
    num_linear_layers: int
    page_shape: tuple[int, int, int]  # [Hkv, 64, D] of K, and again of V, per full layer
    recurrent_shape: tuple[int, int, int]  # f32[Hv, Dk, Dv] per linear layer
    conv_shape: tuple[int, int]  # [M, K-1] per linear layer
    tail_shape: tuple[int]  # [H]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page group: K and V of every full-attention layer."""
        return 2 * self.num_full_layers * math.prod(self.page_shape) * jnp.dtype(self.kv_dtype).itemsize

    @property
    def state_image_bytes(self) -> int:
        """Bytes of one state slot: recurrent and convolution state of every linear layer, and the tail."""
        item = jnp.dtype(self.kv_dtype).itemsize
        per_layer = 4 * math.prod(self.recurrent_shape) + item * math.prod(self.conv_shape)
        return self.num_linear_layers * per_layer + item * math.prod(self.tail_shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Cache:
    """All device memory that outlives a step; donated to every step and returned by it.

    One array per layer, because slicing a stacked pool copies it (spec/jax_facts 7.3).
    """

    k_pages: tuple[jax.Array, ...]  # per full layer [P, Hkv, 64, D]
    v_pages: tuple[jax.Array, ...]  # per full layer [P, Hkv, 64, D]
    recurrent: tuple[jax.Array, ...]  # per linear layer f32[S, Hv, Dk, Dv]
    conv: tuple[jax.Array, ...]  # per linear layer [S, M, K-1], last raw projections, oldest first
    tail_hidden: jax.Array  # [S, H], final-norm hidden of the last token

    @property
    def num_slots(self) -> int:
        """State slots; this index, one past the last, reads as the zero state of a root."""
        return self.tail_hidden.shape[0]


def make_cache_spec(config: Qwen35Config, kv_dtype: str) -> CacheSpec:
    """Returns the cache geometry of a model.

    Args:
        config: the model.
        kv_dtype: "float32" or "bfloat16", the model dtype.
    """
    return CacheSpec(
        kv_dtype=jnp.dtype(kv_dtype).name,
        num_full_layers=len(config.full_layers),
        num_linear_layers=len(config.linear_layers),
        page_shape=(config.num_key_value_heads, PAGE_TOKENS, config.head_dim),
        recurrent_shape=(
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        ),
        conv_shape=(config.conv_channels, config.linear_conv_kernel_dim - 1),
        tail_shape=(config.hidden_size,),
    )


def make_cache(spec: CacheSpec, num_pages: int, num_slots: int) -> Cache:
    """Returns a zeroed cache; zeros, because a NaN in an unused page tail would poison an attention row.

    Args:
        spec: the geometry.
        num_pages: page groups, at least 1.
        num_slots: state slots, at least 1.
    """
    dtype = jnp.dtype(spec.kv_dtype)

    def arrays(count: int, shape: tuple[int, ...], kind: jnp.dtype) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, kind) for _ in range(count))

    pages = (num_pages, *spec.page_shape)
    return Cache(
        k_pages=arrays(spec.num_full_layers, pages, dtype),
        v_pages=arrays(spec.num_full_layers, pages, dtype),
        recurrent=arrays(spec.num_linear_layers, (num_slots, *spec.recurrent_shape), jnp.dtype(jnp.float32)),
        conv=arrays(spec.num_linear_layers, (num_slots, *spec.conv_shape), dtype),
        tail_hidden=jnp.zeros((num_slots, *spec.tail_shape), dtype),
    )
