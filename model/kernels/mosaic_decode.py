"""Paged decode attention on Hopper GPUs: split-K over the pages of a row, Pallas Mosaic GPU.

Owns the kernel and the merge of its partial results. Does not validate; `paged_attention` does.

A block takes one (row, KV head, split). All query heads of the KV head form the rows of one tensor-core tile,
so K and V are read once per group. A row's own pages are shared evenly among the splits, whatever the width
of the table: short rows leave splits idle instead of leaving long rows waiting. Two pages travel while one is
used; each block holds about 180 KiB of shared memory at D = 256, so one block per multiprocessor.

Letters: B rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, P pages, W table width, S splits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ninfer_jax.model.kernels import _mgpu_compat as mgpu

# Multiprocessors of an H100/H200 (SXM): one block each is one wave.
MULTIPROCESSORS = 132
STAGES = 2
LOG2_E = math.log2(math.e)
MASKED_SCORE = -1e30
STORE_COLUMNS = 64


def split_count(rows: int, kv_heads: int, table_pages: int) -> int:
    """Returns how many blocks share one row and KV head: one wave of blocks, and no more than pages."""
    return max(1, min(MULTIPROCESSORS // (rows * kv_heads), table_pages))


def decode_mosaic(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    splits: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Returns attention of one query per row over the first `lengths` tokens of its pages.

    V behind the length of a live page must be finite: its weight is 0, and 0 times NaN is NaN. Pools start
    as zeros.

    Args:
        q: [B, Hq, D], bfloat16 or float16; G at most 64, D a multiple of 64.
        k_pages, v_pages: [P, Hkv, 64, D], same dtype.
        block_tables: int32[B, W]; entries past the length are never read as page ids.
        lengths: int32[B]; rows of 0 give zeros.
        scale: factor on the scores.
        splits: S, blocks per row and KV head; chosen from the shapes if None.
        interpret: parameters of the GPU interpreter, for tests on CPU.

    Returns:
        [B, Hq, D] in the dtype of q; accumulated in float32.
    """
    rows, query_heads, head_dim = q.shape
    kv_heads, page_tokens = k_pages.shape[1:3]
    table_pages = block_tables.shape[1]
    group = query_heads // kv_heads
    splits = splits or split_count(rows, kv_heads, table_pages)
    # Only whole 8-row tiles travel; the other rows of the 64-row instruction compute on whatever is there,
    # and rows never mix.
    used_rows = -(-group // 8) * 8
    tile = mgpu.Tile(is_interpreted=interpret is not None)
    int32 = mgpu.int32

    def body(
        q_gmem, k_gmem, v_gmem, tables_gmem, lengths_gmem, out_gmem, top_gmem, total_gmem,
        q_smem, k_smem, v_smem, out_smem, top_smem, total_smem, q_ready, k_ready, v_ready,
    ):  # fmt: skip
        row, head, split = mgpu.axis_index("row"), mgpu.axis_index("head"), mgpu.axis_index("split")
        length = lengths_gmem[row]
        row_pages = lax.div(length + (page_tokens - 1), int32(page_tokens))
        share = lax.div(row_pages + (splits - 1), int32(splits))
        first = split * share
        count = jnp.maximum(jnp.minimum(first + share, row_pages) - first, 0)

        def page_id(i):
            # Read ahead of its use, so possibly past the end of the row: any id will do there, it is not
            # fetched.
            return tables_gmem[row, jnp.minimum(first + i, table_pages - 1)]

        def fetch_k(page, slot):
            mgpu.load_tile(k_gmem.at[page, head], k_smem.at[slot], k_ready.at[slot])

        def fetch_v(page, slot):
            mgpu.load_tile(v_gmem.at[page, head], v_smem.at[slot], v_ready.at[slot])

        mgpu.load_tile(q_gmem.at[row, head], q_smem.at[mgpu.ds(0, used_rows)], q_ready)
        for stage in range(STAGES):

            @mgpu.when(stage < count)
            def _(stage=stage):
                page = page_id(int32(stage))
                fetch_k(page, int32(stage))
                fetch_v(page, int32(stage))

        mgpu.barrier_wait(q_ready)
        key_offset = tile.iota(page_tokens, 1)

        def step(i, carry):
            acc, top, total = carry
            slot = lax.rem(i, int32(STAGES))
            next_page = page_id(i + STAGES)
            mgpu.barrier_wait(k_ready.at[slot])
            scores = tile.product_transposed(q_smem, k_smem.at[slot]) * (scale * LOG2_E)

            # The product has been waited for, so K's slot is free half a step before V's.
            @mgpu.when(i + STAGES < count)
            def _():
                fetch_k(next_page, slot)

            is_live = key_offset + (first + i) * page_tokens < length
            scores = jnp.where(is_live, scores, MASKED_SCORE)
            new_top = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - tile.across(new_top, page_tokens))
            total = total * shrink + weights.sum(axis=1)
            acc = acc * tile.across(shrink, head_dim)
            mgpu.barrier_wait(v_ready.at[slot])
            acc = tile.add_product(acc, weights.astype(q.dtype), v_smem.at[slot])

            @mgpu.when(i + STAGES < count)
            def _():
                fetch_v(next_page, slot)

            return acc, new_top, total

        carry = (tile.zeros(head_dim), tile.rows(MASKED_SCORE), tile.rows(0.0))
        acc, top, total = lax.fori_loop(0, count, step, carry)
        top_smem[...] = top
        total_smem[...] = total
        for column in range(0, head_dim, STORE_COLUMNS):
            out_smem[...] = acc[:, column : column + STORE_COLUMNS]
            mgpu.commit_smem()
            mgpu.store_tile(
                out_smem.at[mgpu.ds(0, used_rows)],
                out_gmem.at[row, head, split, :, mgpu.ds(column, STORE_COLUMNS)],
            )
            mgpu.wait_stores(0)
        mgpu.store_tile(top_smem, top_gmem.at[row, head, split])
        mgpu.store_tile(total_smem, total_gmem.at[row, head, split])
        mgpu.wait_stores(0)

    grouped = q.reshape(rows, kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, used_rows - group), (0, 0)))
    per_row = jax.ShapeDtypeStruct((rows, kv_heads, splits, mgpu.WGMMA_ROWS), jnp.float32)
    out, top, total = mgpu.kernel(
        body,
        interpret=interpret,
        out_type=[
            jax.ShapeDtypeStruct((rows, kv_heads, splits, used_rows, head_dim), jnp.float32),
            per_row,
            per_row,
        ],
        grid=(rows, kv_heads, splits),
        grid_names=("row", "head", "split"),
        scratch_types=[
            mgpu.shared((mgpu.WGMMA_ROWS, head_dim), q.dtype),
            mgpu.shared((STAGES, page_tokens, head_dim), q.dtype),
            mgpu.shared((STAGES, page_tokens, head_dim), q.dtype),
            mgpu.shared((mgpu.WGMMA_ROWS, STORE_COLUMNS), jnp.float32),
            mgpu.shared((mgpu.WGMMA_ROWS,), jnp.float32),
            mgpu.shared((mgpu.WGMMA_ROWS,), jnp.float32),
            mgpu.barrier(),
            mgpu.barrier(num_barriers=STAGES),
            mgpu.barrier(num_barriers=STAGES),
        ],
    )(grouped, k_pages, v_pages, block_tables, lengths)
    merged = _merge(out[..., :group, :], top[..., :group], total[..., :group])
    return merged.reshape(q.shape).astype(q.dtype)


def _merge(out: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """Returns f32[B, Hkv, G, D], the softmax averages of all splits as one.

    Args:
        out: f32[B, Hkv, S, G, D], weighted sums of V relative to each split's largest score.
        top: f32[B, Hkv, S, G], largest scores in base-2 logarithms.
        total: f32[B, Hkv, S, G], sums of weights; 0 where a split had no pages.
    """
    factor = jnp.exp2(top - top.max(axis=2, keepdims=True))
    weight = jnp.maximum((total * factor).sum(2), 1e-30)
    return (out * factor[..., None]).sum(2) / weight[..., None]
