"""Writes, copies and packs KV pages.

Owns the movement of page contents inside the device: new tokens into pages, whole pages onto pages (copy on
write), and groups of pages of all layers into one buffer for the host tier and back. Does not choose pages,
and does not cross to the host.

Every function that returns pools is in place when the caller's jit donates them (but for bfloat16 on the CPU
of jax 0.10.2, which widens the whole pool first: pools are float32 on CPU). Ids out of range mean
"nothing there": such a write is dropped, so that padding needs no branch.

Letters: P pages, Hkv KV heads, D head size, T tokens, N pages of a group, L layers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def write_tokens(pages: jax.Array, new: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """Returns the pool with one token's K or V written at each (page, offset).

    Args:
        pages: [P, Hkv, page, D]; donate it.
        new: [T, Hkv, D], cast to the dtype of the pool.
        page_ids: int32[T]; ids outside 0..P-1 drop their token.
        offsets: int32[T], position inside the page.

    Raises:
        ValueError: at trace time, if shapes or dtypes do not fit together.
    """
    num_pages, kv_heads, page_tokens, head_dim = _pool_shape("pages", pages)
    tokens = page_ids.shape[0] if page_ids.ndim == 1 else -1
    if new.shape != (tokens, kv_heads, head_dim):
        raise ValueError(
            f"new has shape {new.shape}; expected [T, {kv_heads}, {head_dim}] for pages "
            f"{pages.shape} and page_ids {page_ids.shape}"
        )
    _require_ids("page_ids", page_ids)
    _require_ids("offsets", offsets)
    if offsets.shape != page_ids.shape:
        raise ValueError(f"offsets has shape {offsets.shape}; expected {page_ids.shape}, one per page id")
    # A negative index would count from the end of the pool: send it out of range instead.
    rows = jnp.where(page_ids < 0, num_pages, page_ids)
    columns = jnp.clip(offsets, 0, page_tokens - 1)
    return pages.at[rows, :, columns].set(new.astype(pages.dtype), mode="drop")


def copy_pages(pages: jax.Array, src_ids: jax.Array, dst_ids: jax.Array) -> jax.Array:
    """Returns the pool with whole pages copied; all sources are read before any destination is written.

    Args:
        pages: [P, Hkv, page, D]; donate it.
        src_ids: int32[N], pages to read; ids out of range read the nearest page (for a dropped dst).
        dst_ids: int32[N], pages to overwrite, distinct; ids outside 0..P-1 drop their copy.

    Raises:
        ValueError: at trace time, if shapes or dtypes do not fit together.
    """
    _pool_shape("pages", pages)
    _require_ids("src_ids", src_ids)
    _require_ids("dst_ids", dst_ids)
    if src_ids.shape != dst_ids.shape:
        raise ValueError(
            f"src_ids has shape {src_ids.shape} and dst_ids {dst_ids.shape}; expected one pair per copy"
        )
    return _put(pages, dst_ids, _take(pages, src_ids))


def pack_pages(k_pages: Sequence[jax.Array], v_pages: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
    """Returns one contiguous buffer [L, 2, N, Hkv, page, D] with K and V of the named pages of every layer.

    Args:
        k_pages, v_pages: per layer [P, Hkv, page, D]; only read, do not donate.
        ids: int32[N]; ids out of range pack the nearest page (padding; `unpack_pages` drops it).

    Raises:
        ValueError: at trace time, if the layers do not agree.
    """
    _require_layers(k_pages, v_pages)
    _require_ids("ids", ids)
    return jnp.stack(
        [jnp.stack([_take(k, ids), _take(v, ids)]) for k, v in zip(k_pages, v_pages, strict=True)]
    )


def unpack_pages(
    k_pages: Sequence[jax.Array], v_pages: Sequence[jax.Array], packed: jax.Array, ids: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the K and V pools of every layer with the packed pages written at `ids`.

    Args:
        k_pages, v_pages: per layer [P, Hkv, page, D]; donate them.
        packed: [L, 2, N, Hkv, page, D] of the same dtype, from `pack_pages`.
        ids: int32[N], distinct; ids outside 0..P-1 drop their page.

    Raises:
        ValueError: at trace time, if the layers, the buffer and the ids do not agree.
    """
    _require_layers(k_pages, v_pages)
    _require_ids("ids", ids)
    expected = (len(k_pages), 2, ids.shape[0], *k_pages[0].shape[1:])
    if packed.shape != expected or packed.dtype != k_pages[0].dtype:
        raise ValueError(
            f"packed is {packed.dtype}{list(packed.shape)}; expected {k_pages[0].dtype}{list(expected)} for "
            f"{len(k_pages)} layers and {ids.shape[0]} ids"
        )
    new_k = tuple(_put(pool, ids, packed[layer, 0]) for layer, pool in enumerate(k_pages))
    new_v = tuple(_put(pool, ids, packed[layer, 1]) for layer, pool in enumerate(v_pages))
    return new_k, new_v


def _take(pages: jax.Array, ids: jax.Array) -> jax.Array:
    clipped = jnp.clip(ids, 0, pages.shape[0] - 1)
    return pages.at[clipped].get(mode="promise_in_bounds")


def _put(pages: jax.Array, ids: jax.Array, contents: jax.Array) -> jax.Array:
    rows = jnp.where(ids < 0, pages.shape[0], ids)
    return pages.at[rows].set(contents, mode="drop")


def _pool_shape(name: str, pages: jax.Array) -> tuple[int, int, int, int]:
    if pages.ndim != 4:
        raise ValueError(f"{name} has shape {pages.shape}; expected [pages, kv_heads, page_tokens, head_dim]")
    num_pages, kv_heads, page_tokens, head_dim = pages.shape
    return num_pages, kv_heads, page_tokens, head_dim


def _require_ids(name: str, ids: jax.Array) -> None:
    if ids.ndim != 1 or ids.dtype != jnp.int32:
        raise ValueError(f"{name} is {ids.dtype}{list(ids.shape)}; expected int32 of one dimension")


def _require_layers(k_pages: Sequence[jax.Array], v_pages: Sequence[jax.Array]) -> None:
    if not k_pages or len(k_pages) != len(v_pages):
        raise ValueError(
            f"got {len(k_pages)} K pools and {len(v_pages)} V pools; expected one of each per layer"
        )
    first = k_pages[0]
    _pool_shape("k_pages[0]", first)
    for pool in (*k_pages, *v_pages):
        if pool.shape != first.shape or pool.dtype != first.dtype:
            raise ValueError(
                f"a pool is {pool.dtype}{list(pool.shape)}; expected {first.dtype}{list(first.shape)} like "
                "the first layer: layers of different shape are packed apart"
            )
