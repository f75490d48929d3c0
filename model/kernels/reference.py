"""Plain gather oracles of the attention kernels: every page of the table, one dense softmax, float32.

Owns the meaning of the two attention functions, and no speed: memory and time follow the width of the table.
"""

import jax
import jax.numpy as jnp


def decode_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns attention of one query per row over its first `lengths` tokens, and 0 where there are none.

    Args:
        q: [B, Hq, D].
        k_pages, v_pages: [P, Hkv, page, D].
        block_tables: int32[B, W].
        lengths: int32[B].
        scale: factor on the scores.

    Returns:
        [B, Hq, D] in the dtype of q.
    """
    return jax.vmap(
        lambda query, table, length: _attend(
            query[None], k_pages, v_pages, table, length[None] - 1, length, scale=scale
        )[0]
    )(q, block_tables, lengths)


def prefill_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    start_tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns causal attention of a chunk at positions start .. start + T - 1 over the live tokens.

    Args:
        q: [T, Hq, D].
        k_pages, v_pages: [P, Hkv, page, D], with the chunk's own K and V in place.
        block_table: int32[W].
        start_tokens, num_tokens: int32[].
        scale: factor on the scores.

    Returns:
        [T, Hq, D] in the dtype of q.
    """
    positions = start_tokens + jnp.arange(q.shape[0])
    return _attend(q, k_pages, v_pages, block_table, positions, start_tokens + num_tokens, scale=scale)


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    live_tokens: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns [T, Hq, D]; query t sees the keys at most at positions[t] and below live_tokens."""
    num_queries, query_heads, head_dim = q.shape
    num_pages, kv_heads = k_pages.shape[:2]
    ids = jnp.clip(block_table, 0, num_pages - 1)
    keys = k_pages[ids].astype(jnp.float32).transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    values = v_pages[ids].astype(jnp.float32).transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    key_positions = jnp.arange(keys.shape[1])
    is_live = key_positions < live_tokens
    is_seen = (key_positions <= positions[:, None]) & is_live

    grouped = q.reshape(num_queries, kv_heads, query_heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("thgd,hkd->hgtk", grouped, keys) * scale
    scores = jnp.where(is_seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(is_seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    values = jnp.where(is_live[:, None], values, 0.0)
    out = jnp.einsum("hgtk,hkd->thgd", weights / total, values)
    return out.reshape(q.shape).astype(q.dtype)
