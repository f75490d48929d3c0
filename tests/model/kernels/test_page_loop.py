"""The XLA page loops against the gather oracles (T-4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ninfer_jax.model.kernels.paged_attention import decode_attention, prefill_attention
from ninfer_jax.model.kernels.reference import decode_attention_reference, prefill_attention_reference

PAGE = 64
# float32 sums in another order; scores are about 1, values about 1.
TOLERANCE = 3e-6


def paged(lengths, *, kv_heads=2, head_dim=32, dtype=np.float32, width=None, seed=0):
    """Pools whose every token not named by a length is NaN, and tables of shuffled ids padded with a NaN page."""
    rng = np.random.default_rng(seed)
    pages_of = [-(-length // PAGE) for length in lengths]
    num_pages = sum(pages_of) + 3
    free = list(rng.permutation(num_pages))
    nan_page = free.pop()
    width = width or max(pages_of) + 1
    tables = np.full((len(lengths), width), nan_page, np.int32)
    pools = np.full((2, num_pages, kv_heads, PAGE, head_dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for i in range(pages_of[row]):
            page = tables[row, i] = free.pop()
            live = min(PAGE, length - i * PAGE)
            pools[:, page, :, :live] = rng.standard_normal((2, kv_heads, live, head_dim))
    return jnp.array(pools[0], dtype), jnp.array(pools[1], dtype), jnp.array(tables)


def queries(count, heads, head_dim, *, dtype=np.float32, seed=1):
    return jnp.array(np.random.default_rng(seed).standard_normal((count, heads, head_dim)), dtype)


@pytest.mark.parametrize("group", range(1, 9))
def test_decode_matches_the_oracle_for_every_group_size(group):
    lengths = [0, 1, 63, 64, 65, 300]
    k, v, tables = paged(lengths)
    q = queries(len(lengths), 2 * group, 32)
    args = (q, k, v, tables, jnp.array(lengths, jnp.int32))
    got = jax.jit(lambda *a: decode_attention(*a, scale=0.2))(*args)
    want = decode_attention_reference(*args, scale=0.2)
    np.testing.assert_array_equal(got[0], 0.0)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_decode_matches_a_softmax_written_out_in_numpy():
    k, v, tables = paged([70], kv_heads=1, head_dim=8)
    q = queries(1, 2, 8)
    got = decode_attention(q, k, v, tables, jnp.array([70], jnp.int32), scale=0.5)
    keys = np.concatenate([np.array(k)[tables[0, 0], 0], np.array(k)[tables[0, 1], 0]])[:70]
    values = np.concatenate([np.array(v)[tables[0, 0], 0], np.array(v)[tables[0, 1], 0]])[:70]
    for head in range(2):
        weights = np.exp(0.5 * keys @ np.array(q)[0, head])
        np.testing.assert_allclose(got[0, head], weights @ values / weights.sum(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "start,num,padded", [(0, 1, 64), (0, 64, 64), (65, 63, 64), (0, 300, 320), (200, 130, 256), (64, 0, 64)]
)
@pytest.mark.parametrize("group", [1, 4])
def test_prefill_matches_the_oracle(start, num, padded, group):
    k, v, tables = paged([start + num])
    q = queries(padded, 2 * group, 32)
    args = (q, k, v, tables[0], jnp.int32(start), jnp.int32(num))
    got = jax.jit(lambda *a: prefill_attention(*a, scale=0.2))(*args)
    want = prefill_attention_reference(*args, scale=0.2)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:num], want[:num], atol=TOLERANCE, rtol=0)
