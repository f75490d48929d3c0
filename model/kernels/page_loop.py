"""Attention over paged KV in plain XLA: loops over live pages with an online softmax.

Owns the CPU path (and the fallback of devices without wgmma). Does not validate: `paged_attention` does, and
it alone decides which backend runs.

Letters: B rows, T queries, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, P pages, W table width.

Both loops take their trip counts from the live lengths, so the cost follows live tokens and not the width of
the table. Nothing that is masked can reach the result, whatever its bits: scores of masked keys are replaced
after the product, and masked rows of V are zeroed before theirs (a zero weight times NaN would still be NaN).
"""

import jax
import jax.numpy as jnp
from jax import lax

# Pages per loop step. Decode: 2 keep K and V of a step in the second-level cache at D = 256 (4 and more were
# slower on two cores). Prefill: 4 pages and 128 queries per block reached 70 % of the dense matmul rate,
# larger blocks less.
DECODE_STEP_PAGES = 2
PREFILL_STEP_PAGES = 4
PREFILL_BLOCK_QUERIES = 128

# Finite, so that the difference of two masked scores is 0 and not NaN.
MASKED_SCORE = -1e30


def decode_page_loop(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns attention of one query per row over the first `lengths` tokens of its pages.

    Rows are taken one after another, each for as many steps as its own length needs: a long row among short
    ones costs its own pages only. (One loop for all rows is up to a third faster when all lengths are equal,
    and as many times slower as the longest row exceeds the mean.)

    Args:
        q: [B, Hq, D].
        k_pages, v_pages: [P, Hkv, page, D].
        block_tables: int32[B, W], page ids in order; entries past the length may hold anything.
        lengths: int32[B], live tokens; rows of 0 give zeros.
        scale: factor on the scores.

    Returns:
        [B, Hq, D] in the dtype of q; accumulated in float32.
    """
    rows, query_heads, head_dim = q.shape
    kv_heads, page_tokens = k_pages.shape[1:3]
    group = query_heads // kv_heads
    step_tokens = DECODE_STEP_PAGES * page_tokens
    tables = _pad_table(block_tables, DECODE_STEP_PAGES)
    scaled = q.reshape(rows, kv_heads, group, head_dim).astype(jnp.float32) * scale

    def attend_row(row: jax.Array, out: jax.Array) -> jax.Array:
        length = lengths[row]
        query = scaled[row]

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            ids = lax.dynamic_slice(tables, (row, i * DECODE_STEP_PAGES), (1, DECODE_STEP_PAGES))[0]
            is_live = i * step_tokens + jnp.arange(step_tokens) < length
            keys = _gather(k_pages, ids)
            values = jnp.where(is_live[:, None], _gather(v_pages, ids), 0.0)
            scores = jnp.where(is_live, jnp.einsum("hgd,hkd->hgk", query, keys), MASKED_SCORE)
            new_top = jnp.maximum(top, scores.max(-1))
            shrink = jnp.exp(top - new_top)
            weights = jnp.exp(scores - new_top[..., None])
            acc = acc * shrink[..., None] + jnp.einsum("hgk,hkd->hgd", weights, values)
            return acc, new_top, total * shrink + weights.sum(-1)

        carry = _empty_softmax((kv_heads, group), head_dim)
        acc, _, total = lax.fori_loop(0, _steps(length, step_tokens), step, carry)
        return lax.dynamic_update_index_in_dim(out, _normalise(acc, total), row, 0)

    out = lax.fori_loop(0, rows, attend_row, jnp.zeros(scaled.shape, jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)


def prefill_page_loop(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    start_tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns causal attention of one chunk of queries over pages that already hold its own K and V.

    Blocks of queries meet blocks of pages; a block of queries stops at the page of its last query, and a
    block that is all padding takes no step.

    Args:
        q: [T, Hq, D], at positions start_tokens .. start_tokens + T - 1.
        k_pages, v_pages: [P, Hkv, page, D].
        block_table: int32[W], page ids in order; entries past the live tokens may hold anything.
        start_tokens: int32[], tokens before the chunk.
        num_tokens: int32[], queries that are no padding.
        scale: factor on the scores.

    Returns:
        [T, Hq, D] in the dtype of q; rows of padding are finite and mean nothing.
    """
    num_queries, query_heads, head_dim = q.shape
    kv_heads, page_tokens = k_pages.shape[1:3]
    group = query_heads // kv_heads
    block = min(PREFILL_BLOCK_QUERIES, num_queries)
    num_blocks = -(-num_queries // block)
    step_tokens = PREFILL_STEP_PAGES * page_tokens
    table = _pad_table(block_table[None], PREFILL_STEP_PAGES)[0]
    live = start_tokens + num_tokens

    padded = jnp.pad(q, ((0, num_blocks * block - num_queries), (0, 0), (0, 0))).astype(jnp.float32) * scale
    # [blocks, Hkv, G * block, D]: the queries of one KV head side by side make one matrix product per head.
    queries = padded.reshape(num_blocks, block, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(num_blocks, kv_heads, group * block, head_dim)

    def attend_block(j: jax.Array, out: jax.Array) -> jax.Array:
        query = queries[j]
        positions = start_tokens + j * block + jnp.arange(block)
        end = jnp.minimum(start_tokens + (j + 1) * block, live)

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            ids = lax.dynamic_slice(table, (i * PREFILL_STEP_PAGES,), (PREFILL_STEP_PAGES,))
            key_positions = i * step_tokens + jnp.arange(step_tokens)
            is_live = key_positions < live
            keys = _gather(k_pages, ids)
            values = jnp.where(is_live[:, None], _gather(v_pages, ids), 0.0)
            scores = jnp.einsum("hqd,hkd->hqk", query, keys)
            scores = scores.reshape(kv_heads, group, block, step_tokens)
            is_seen = (key_positions <= positions[:, None]) & is_live
            scores = jnp.where(is_seen, scores, MASKED_SCORE)
            new_top = jnp.maximum(top, scores.max(-1))
            shrink = jnp.exp(top - new_top)
            weights = jnp.exp(scores - new_top[..., None])
            product = jnp.einsum(
                "hqk,hkd->hqd", weights.reshape(kv_heads, group * block, step_tokens), values
            )
            acc = acc * shrink[..., None] + product.reshape(acc.shape)
            return acc, new_top, total * shrink + weights.sum(-1)

        steps = jnp.where(j * block < num_tokens, _steps(end, step_tokens), 0)
        carry = _empty_softmax((kv_heads, group, block), head_dim)
        acc, _, total = lax.fori_loop(0, steps, step, carry)
        attended = _normalise(acc, total).transpose(2, 0, 1, 3).reshape(block, query_heads, head_dim)
        return lax.dynamic_update_slice(out, attended.astype(out.dtype), (j * block, 0, 0))

    out = lax.fori_loop(0, num_blocks, attend_block, jnp.zeros(padded.shape, q.dtype))
    return out[:num_queries]


def _pad_table(tables: jax.Array, step_pages: int) -> jax.Array:
    """Returns the tables widened to whole steps: a slice that would overrun would silently shift back."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % step_pages)))


def _steps(tokens: jax.Array, step_tokens: int) -> jax.Array:
    return (tokens + step_tokens - 1) // step_tokens


def _gather(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns float32[Hkv, n * page, D], the named pages side by side, KV head first.

    The pool is seen as [P * Hkv, page, D]: gathering head-major needs no transposed copy.
    """
    num_pages, kv_heads, page_tokens, head_dim = pages.shape
    flat = pages.reshape(num_pages * kv_heads, page_tokens, head_dim)
    rows = jnp.clip(ids, 0, num_pages - 1) * kv_heads + jnp.arange(kv_heads)[:, None]
    gathered = flat.at[rows].get(mode="promise_in_bounds")
    return gathered.astype(jnp.float32).reshape(kv_heads, ids.shape[0] * page_tokens, head_dim)


def _empty_softmax(shape: tuple[int, ...], head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns accumulator, running maximum and running sum before the first key."""
    return (
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full(shape, MASKED_SCORE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _normalise(acc: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the softmax average, and 0 where no key was seen."""
    return acc / jnp.maximum(total, 1e-30)[..., None]
