"""Paged pools for kernel tests: shuffled ids, and NaN wherever nothing may be read."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE_TOKENS = 64


@pytest.fixture
def make_paged() -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    return _paged


@pytest.fixture
def make_queries() -> Callable[..., jax.Array]:
    return _queries


def _paged(
    lengths: Sequence[int],
    *,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: str = "float32",
    tail: float = np.nan,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K and V pools and the tables of rows of these lengths.

    Pages that no row holds are NaN, and tables end in one; `tail` fills live pages behind the length.
    """
    rng = np.random.default_rng(seed)
    pages_of = [-(-length // PAGE_TOKENS) for length in lengths]
    num_pages = sum(pages_of) + 3
    free = list(rng.permutation(num_pages))
    nan_page = free.pop()
    tables = np.full((len(lengths), max(pages_of) + 1), nan_page, np.int32)
    pools = np.full((2, num_pages, kv_heads, PAGE_TOKENS, head_dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for i in range(pages_of[row]):
            page = tables[row, i] = free.pop()
            live = min(PAGE_TOKENS, length - i * PAGE_TOKENS)
            pools[:, page] = tail
            pools[:, page, :, :live] = rng.standard_normal((2, kv_heads, live, head_dim))
    return jnp.array(pools[0], dtype), jnp.array(pools[1], dtype), jnp.array(tables)


def _queries(count: int, heads: int, head_dim: int, *, dtype: str = "float32", seed: int = 1) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).standard_normal((count, heads, head_dim)), dtype)
