"""Paged causal prefill attention on Hopper GPUs, Pallas Mosaic GPU.

Owns the kernel. Does not validate; `paged_attention` does.

A block takes 128 consecutive queries of one query head: two warpgroups compute on 64 rows each and share
every page, a third one copies pages ahead of them. Pages after the last query of the block, or after the live
tokens, are never fetched. The heads of one group re-read K and V through the second-level cache: a page of 64
x 256 for 128 rows keeps that below what the cache delivers.

Letters: T queries, Hq query heads, Hkv KV heads, D head size, P pages, W table width.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ninfer_jax.model.kernels import _mgpu_compat as mgpu

COMPUTE_WARPGROUPS = 2
BLOCK_QUERIES = COMPUTE_WARPGROUPS * mgpu.WGMMA_ROWS
STAGES = 2
LOG2_E = math.log2(math.e)
MASKED_SCORE = -1e30


def prefill_mosaic(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    start_tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    scale: float,
    interpret: Any = None,
) -> jax.Array:
    """Returns causal attention of one chunk of queries over pages that already hold the chunk's K and V.

    V behind the live tokens of a live page must be finite: its weight is 0, and 0 times NaN is NaN. Pools
    start as zeros.

    Args:
        q: [T, Hq, D], bfloat16 or float16; D a multiple of 64.
        k_pages, v_pages: [P, Hkv, 64, D], same dtype.
        block_table: int32[W]; entries past the live tokens are never read as page ids.
        start_tokens: int32[], tokens before the chunk.
        num_tokens: int32[], queries that are no padding.
        scale: factor on the scores.
        interpret: parameters of the GPU interpreter, for tests on CPU.

    Returns:
        [T, Hq, D] in the dtype of q; accumulated in float32. Rows of padding are finite and mean nothing.
    """
    num_queries, query_heads, head_dim = q.shape
    kv_heads, page_tokens = k_pages.shape[1:3]
    group = query_heads // kv_heads
    num_blocks = -(-num_queries // BLOCK_QUERIES)
    is_interpreted = interpret is not None
    tile = mgpu.Tile(is_interpreted=is_interpreted)
    int32 = mgpu.int32

    def body(
        q_gmem, k_gmem, v_gmem, table_gmem, extent_gmem, out_gmem,
        qo_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free,
    ):  # fmt: skip
        head, worker = mgpu.axis_index("head"), mgpu.axis_index("worker")
        # Long blocks first: the last ones see the most keys, and would otherwise run alone at the end.
        block_first = (num_blocks - 1 - mgpu.axis_index("block")) * BLOCK_QUERIES
        start, num = extent_gmem[0], extent_gmem[1]
        end = start + jnp.minimum(block_first + BLOCK_QUERIES, num)
        pages = lax.div(end + (page_tokens - 1), int32(page_tokens))
        pages = jnp.where(block_first < num, pages, 0)

        @mgpu.when(worker < COMPUTE_WARPGROUPS)
        def _compute():
            mgpu.use_registers(232, is_more=True, is_interpreted=is_interpreted)
            first = block_first + worker * mgpu.WGMMA_ROWS
            tile_smem = qo_smem.at[worker]
            mgpu.load_tile(q_gmem.at[mgpu.ds(first, mgpu.WGMMA_ROWS), head], tile_smem, q_ready.at[worker])
            mgpu.barrier_wait(q_ready.at[worker])

            def step(i, carry):
                acc, top, total = carry
                slot = lax.rem(i, int32(STAGES))
                mgpu.barrier_wait(k_ready.at[slot])
                scores = tile.product_transposed(tile_smem, k_smem.at[slot]) * (scale * LOG2_E)
                mgpu.barrier_arrive(k_free.at[slot])

                # Query minus key position, relative to the corner of this tile.
                lead = tile.iota(page_tokens, 0) - tile.iota(page_tokens, 1)
                is_seen = lead + (start + first - i * page_tokens) >= 0
                scores = jnp.where(is_seen, scores, MASKED_SCORE)
                new_top = jnp.maximum(top, scores.max(axis=1))
                shrink = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores - tile.across(new_top, page_tokens))
                total = total * shrink + weights.sum(axis=1)
                acc = acc * tile.across(shrink, head_dim)
                mgpu.barrier_wait(v_ready.at[slot])
                acc = tile.add_product(acc, weights.astype(q.dtype), v_smem.at[slot])
                mgpu.barrier_arrive(v_free.at[slot])
                return acc, new_top, total

            carry = (tile.zeros(head_dim), tile.rows(MASKED_SCORE), tile.rows(0.0))
            acc, _, total = lax.fori_loop(0, pages, step, carry)
            # A block of padding has seen no key; its zeros stay zeros.
            acc = acc / tile.across(jnp.maximum(total, 1e-30), head_dim)
            tile_smem[...] = acc.astype(q.dtype)
            mgpu.commit_smem()
            mgpu.store_tile(tile_smem, out_gmem.at[mgpu.ds(first, mgpu.WGMMA_ROWS), head])
            mgpu.wait_stores(0)

        @mgpu.when(worker == COMPUTE_WARPGROUPS)
        def _copy():
            mgpu.use_registers(40, is_more=False, is_interpreted=is_interpreted)
            kv_head = lax.div(head, int32(group))

            def step(i, _):
                slot = lax.rem(i, int32(STAGES))
                page = table_gmem[i]

                @mgpu.when(i >= STAGES)
                def _():
                    mgpu.barrier_wait(k_free.at[slot])

                mgpu.load_tile(k_gmem.at[page, kv_head], k_smem.at[slot], k_ready.at[slot])

                @mgpu.when(i >= STAGES)
                def _():
                    mgpu.barrier_wait(v_free.at[slot])

                mgpu.load_tile(v_gmem.at[page, kv_head], v_smem.at[slot], v_ready.at[slot])
                return ()

            lax.fori_loop(0, pages, step, ())

            # The last releases are waited for too: a barrier must not complete a phase that nobody observes.
            def drain(i, _):
                slot = lax.rem(i, int32(STAGES))
                mgpu.barrier_wait(k_free.at[slot])
                mgpu.barrier_wait(v_free.at[slot])
                return ()

            lax.fori_loop(jnp.maximum(pages - STAGES, 0), pages, drain, ())

    padded = jnp.pad(q, ((0, num_blocks * BLOCK_QUERIES - num_queries), (0, 0), (0, 0)))
    out = mgpu.kernel(
        body,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct(padded.shape, q.dtype),
        grid=(query_heads, num_blocks),
        grid_names=("head", "block"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="worker",
        scratch_types=[
            mgpu.shared((COMPUTE_WARPGROUPS, mgpu.WGMMA_ROWS, head_dim), q.dtype),
            mgpu.shared((STAGES, page_tokens, head_dim), q.dtype),
            mgpu.shared((STAGES, page_tokens, head_dim), q.dtype),
            mgpu.barrier(num_barriers=COMPUTE_WARPGROUPS),
            mgpu.barrier(num_barriers=STAGES),
            mgpu.barrier(num_barriers=STAGES),
            mgpu.barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=STAGES),
            mgpu.barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=STAGES),
        ],
    )(padded, k_pages, v_pages, block_table, jnp.stack([start_tokens, num_tokens]))
    return out[:num_queries]
