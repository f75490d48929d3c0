"""The two attention functions over paged KV that the model calls: one query per row, or one chunk of queries.

Owns their contract: shapes are checked at trace time and the backend is a static choice. Does not compute:
the loops are in `page_loop`, the GPU kernels in `mosaic_decode` and `mosaic_prefill`, the meaning in
`reference`.

Letters: B rows, T queries, Hq query heads, Hkv KV heads, D head size, P pages, W table width.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from ninfer_jax.model.cache import PAGE_TOKENS
from ninfer_jax.model.kernels.page_loop import decode_page_loop, prefill_page_loop

Backend = Literal["xla", "mosaic"]

# The instructions of the GPU kernels (wgmma) exist in this generation alone: not before, and not after it.
_HOPPER_MAJOR = "9"


def supports_mosaic(
    *,
    platform: str,
    compute_capability: str | None,
    dtype: str,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> bool:
    """Returns whether the GPU kernels can run a model of this geometry on such a device.

    Args:
        platform: of the device, such as "cpu" or "gpu".
        compute_capability: of the device, such as "9.0"; None where it has none.
        dtype: of queries and pages.
        num_query_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq.
        head_dim: D.
    """
    is_hopper = (compute_capability or "").partition(".")[0] == _HOPPER_MAJOR
    return (
        platform in ("gpu", "cuda")
        and is_hopper
        and not _tensor_core_problem(jnp.dtype(dtype), head_dim, num_query_heads // num_kv_heads)
    )


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    backend: Backend = "xla",
) -> jax.Array:
    """Returns attention of one query per row over the first `lengths` tokens of its pages.

    Args:
        q: [B, Hq, D].
        k_pages, v_pages: [P, Hkv, 64, D]; Hq is a multiple of Hkv, and KV heads are never repeated.
        block_tables: int32[B, W], page ids in token order; entries past the length may hold anything.
        lengths: int32[B], live tokens, at most 64 * W; a row of 0 gives zeros.
        scale: factor on the scores.
        backend: "xla" runs everywhere; "mosaic" needs a Hopper GPU and 16-bit floats.

    Returns:
        [B, Hq, D] in the dtype of q.

    Raises:
        ValueError: at trace time, if shapes, dtypes or the backend do not fit.
    """
    _require_pools(q, k_pages, v_pages, query_axes="[rows, query_heads, head_dim]")
    rows = q.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != rows or block_tables.dtype != jnp.int32:
        raise ValueError(
            f"block_tables is {block_tables.dtype}{list(block_tables.shape)}; expected int32[{rows}, table "
            "width], one row per query"
        )
    if lengths.shape != (rows,) or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths is {lengths.dtype}{list(lengths.shape)}; expected int32[{rows}]")
    if _is_mosaic(backend):
        _require_tensor_core_shapes(q, k_pages)
        # Imported on use: nobody on a CPU should pay for loading Pallas.
        from ninfer_jax.model.kernels.mosaic_decode import decode_mosaic

        return decode_mosaic(q, k_pages, v_pages, block_tables, lengths, scale=scale)
    return decode_page_loop(q, k_pages, v_pages, block_tables, lengths, scale=scale)


def prefill_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    start_tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    scale: float,
    backend: Backend = "xla",
) -> jax.Array:
    """Returns causal attention of one chunk of queries over pages that already hold the chunk's K and V.

    Args:
        q: [T, Hq, D], at positions start_tokens .. start_tokens + T - 1.
        k_pages, v_pages: [P, Hkv, 64, D]; Hq is a multiple of Hkv, and KV heads are never repeated.
        block_table: int32[W], page ids in token order; entries past the live tokens may hold anything.
        start_tokens: int32[], tokens before the chunk.
        num_tokens: int32[], queries that are no padding; start_tokens + num_tokens is at most 64 * W.
        scale: factor on the scores.
        backend: "xla" runs everywhere; "mosaic" needs a Hopper GPU and 16-bit floats.

    Returns:
        [T, Hq, D] in the dtype of q; rows from num_tokens on are finite and mean nothing.

    Raises:
        ValueError: at trace time, if shapes, dtypes or the backend do not fit.
    """
    _require_pools(q, k_pages, v_pages, query_axes="[tokens, query_heads, head_dim]")
    if block_table.ndim != 1 or block_table.dtype != jnp.int32:
        raise ValueError(
            f"block_table is {block_table.dtype}{list(block_table.shape)}; expected int32[table "
            "width], one sequence"
        )
    for name, value in (("start_tokens", start_tokens), ("num_tokens", num_tokens)):
        if value.shape != () or value.dtype != jnp.int32:
            raise ValueError(f"{name} is {value.dtype}{list(value.shape)}; expected an int32 scalar array")
    if _is_mosaic(backend):
        _require_tensor_core_shapes(q, k_pages)
        from ninfer_jax.model.kernels.mosaic_prefill import prefill_mosaic

        return prefill_mosaic(q, k_pages, v_pages, block_table, start_tokens, num_tokens, scale=scale)
    return prefill_page_loop(q, k_pages, v_pages, block_table, start_tokens, num_tokens, scale=scale)


def _is_mosaic(backend: str) -> bool:
    if backend not in ("xla", "mosaic"):
        raise ValueError(f"backend is {backend!r}; expected 'xla' or 'mosaic'")
    return backend == "mosaic"


def _require_tensor_core_shapes(q: jax.Array, pages: jax.Array) -> None:
    """Raises for what the GPU kernels cannot hold in one tile, and the XLA path can."""
    if q.dtype != pages.dtype:
        raise ValueError(
            f"q is {q.dtype} and the pages {pages.dtype}; the mosaic backend needs one 16-bit float dtype "
            "for both: use bfloat16, or backend='xla'"
        )
    problem = _tensor_core_problem(q.dtype, q.shape[2], q.shape[1] // pages.shape[1])
    if problem is not None:
        raise ValueError(problem)


def _tensor_core_problem(dtype: jnp.dtype, head_dim: int, group: int) -> str | None:
    """Returns what keeps a geometry from the GPU kernels, or None: the one place that knows their limits."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype is {dtype}; the mosaic backend needs bfloat16 or float16, or use 'xla'"
    if head_dim % 64 or head_dim > 256:
        return f"head_dim is {head_dim}; the mosaic backend needs 64, 128, 192 or 256, or use 'xla'"
    if group > 64:
        return f"{group} query heads share a KV head; the mosaic backend holds 64, or use 'xla'"
    return None


def _require_pools(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, *, query_axes: str) -> None:
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}; expected {query_axes}")
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"k_pages has shape {k_pages.shape} and v_pages {v_pages.shape}; expected both "
            f"[pages, kv_heads, {PAGE_TOKENS}, head_dim]"
        )
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages is {k_pages.dtype} and v_pages {v_pages.dtype}; expected one dtype")
    for name, array in (("q", q), ("k_pages", k_pages)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}; expected a float dtype")
    _, kv_heads, page_tokens, head_dim = k_pages.shape
    if page_tokens != PAGE_TOKENS:
        raise ValueError(
            f"pages hold {page_tokens} tokens; expected {PAGE_TOKENS}, the page size of every kernel"
        )
    if q.shape[2] != head_dim:
        raise ValueError(f"q has head_dim {q.shape[2]}; expected {head_dim}, that of the pages")
    if q.shape[1] % kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads; expected a multiple of the {kv_heads} KV heads")
