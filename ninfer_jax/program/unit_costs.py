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
            config,
            spec,
            dtype=dtype,
            bucket_tokens=prefill_buckets(prefill_chunk_tokens)[-1],
            num_lanes=num_lanes,
        ),
    )


def scratch_bytes(
    config: Qwen35Config, spec: CacheSpec, *, dtype: DTypeName, bucket_tokens: int, num_lanes: int
) -> int:
    """Returns an upper estimate of the temporary bytes of the largest step.

    Prefill: the widest mixer or feed-forward of one layer, plus one mixer output per layer, because XLA
    allocates the zeros that each layer's loop writes into at the start of the program. Decode: the gathered
    state of every lane, and some float32 rows over the vocabulary.

    Measured on CPU with `memory_analysis`, MiB for prefill of 1,024 / prefill of 64 / decode of 8, and this
    function without the outer maximum in brackets: dense-tiny 17/1.6/1.2 (29/2.1/1.1), 12 layers of 512
    57/4.9/10 (85/7.7/11), 0.8B 335/48/155 (415/62/215).

    Args:
        config: geometry.
        spec: cache layout.
        dtype: of activations; the delta rule runs in float32 whatever it is.
        bucket_tokens: the largest prefill bucket.
        num_lanes: the largest decode batch.
    """
    item = jnp.dtype(dtype).itemsize
    hidden = config.hidden_size
    value_width = config.linear_num_value_heads * config.linear_value_head_dim
    key_width = config.linear_num_value_heads * config.linear_key_head_dim  # after grouping, per value head
    query_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    projections = config.conv_channels + 2 * value_width
    chunk_matrices = 8 * 64 * config.linear_num_value_heads  # 64 x 64 per chunk and head
    delta = item * (projections + 2 * config.conv_channels) + 4 * (
        6 * max(value_width, key_width) + chunk_matrices
    )
    attention = item * (5 * query_width + 4 * kv_width)
    feed_forward = item * 3 * (config.intermediate_size or 0)
    if config.moe is not None:
        moe = config.moe
        routed = moe.num_experts_per_tok * (3 * moe.moe_intermediate_size + 2 * hidden)
        feed_forward = item * (routed + 3 * moe.shared_expert_intermediate_size) + 4 * 3 * moe.num_experts
    outputs = 4 * value_width * len(config.linear_layers) + item * query_width * len(config.full_layers)
    prefill = bucket_tokens * (outputs + max(delta, attention, feed_forward) + item * 4 * hidden)
    prefill += 2 * spec.state_image_bytes
    decode = num_lanes * (spec.state_image_bytes + 8 * 4 * config.vocab_size)
    return max(prefill, decode)
