"""Owns what one unit of each axis costs for a given model: weights, pages, states, sampler rows, scratch.

It does not own how many of each there are (`sizing`). Needs a config only, so it runs before any weight is
read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.model.cache import CacheSpec
from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.loader import DTypeName, param_bytes
from ninfer_jax.model.sampling import make_sampler_state
from ninfer_jax.program.execution import prefill_buckets
from ninfer_jax.program.sizing import UnitCosts


def make_unit_costs(
    config: Qwen35Config, spec: CacheSpec, *, dtype: DTypeName, prefill_chunk_tokens: int, num_lanes: int
) -> UnitCosts:
    """Returns the unit costs of one model.

    Args:
        config: geometry.
        spec: cache layout; its dtype is the KV dtype.
        dtype: of weights and activations.
        prefill_chunk_tokens: the longest chunk, for scratch.
        num_lanes: C, for scratch.
    """
    sampler = jax.eval_shape(lambda: make_sampler_state(1, config.vocab_size, config.vocab_size))
    return UnitCosts(
        weights_bytes=param_bytes(config, dtype),
        page_bytes=spec.page_bytes,
        state_image_bytes=spec.state_image_bytes,
        sampler_row_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sampler)),
        scratch_bytes=scratch_bytes(
            config, dtype=dtype, chunk_tokens=prefill_buckets(prefill_chunk_tokens)[-1], num_lanes=num_lanes
        ),
    )


def scratch_bytes(config: Qwen35Config, *, dtype: DTypeName, chunk_tokens: int, num_lanes: int) -> int:
    """Returns an upper estimate of the temporary bytes of the largest step.

    Prefill holds, per token of the bucket, a few residual-wide rows, one layer's projections and the chunked
    delta rule's float32 matrices (64 tokens per chunk and value head). Decode holds a few float32 rows over
    the vocabulary per lane. Whichever is larger counts; checked against `memory_analysis` of compiled
    programs in the tests.
    """
    item = jnp.dtype(dtype).itemsize
    hidden = config.hidden_size
    widest_ffn = config.intermediate_size or 0
    if config.moe is not None:
        moe = config.moe
        widest_ffn = (
            moe.num_experts_per_tok * (moe.moe_intermediate_size + hidden)
            + moe.shared_expert_intermediate_size
            + moe.num_experts
        )
    attention = (
        2 * config.num_attention_heads * config.head_dim + 2 * config.num_key_value_heads * config.head_dim
    )
    delta_inputs = config.conv_channels + 2 * config.linear_value_width
    delta_matrices = 6 * 64 * config.linear_num_value_heads + 4 * config.linear_value_width
    per_token = item * (6 * hidden + 3 * max(widest_ffn, attention, delta_inputs)) + 4 * delta_matrices
    state = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    prefill = chunk_tokens * per_token + 4 * state
    decode = num_lanes * (8 * 4 * config.vocab_size + per_token + 3 * state)
    return max(prefill, decode)
