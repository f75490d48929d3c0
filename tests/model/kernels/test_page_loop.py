"""The XLA page loops against the gather oracles and against numpy (T-4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model.kernels.page_loop import decode_page_loop, prefill_page_loop
from ninfer_jax.model.kernels.reference import decode_attention_reference, prefill_attention_reference

# float32 sums in another order; scores and values are about 1.
TOLERANCE = 3e-6

decode = jax.jit(decode_page_loop, static_argnames="scale")
prefill = jax.jit(prefill_page_loop, static_argnames="scale")
decode_oracle = jax.jit(decode_attention_reference, static_argnames="scale")
prefill_oracle = jax.jit(prefill_attention_reference, static_argnames="scale")


@pytest.mark.parametrize("group", range(1, 9))
def test_decode_matches_the_oracle_for_every_group_size(group, make_paged, make_queries):
    lengths = [0, 1, 63, 64, 65, 300]
    k, v, tables = make_paged(lengths)
    args = (make_queries(len(lengths), 2 * group, 32), k, v, tables, jnp.array(lengths, jnp.int32))
    got = decode(*args, scale=0.2)
    np.testing.assert_array_equal(got[0], 0.0)
    want = decode_oracle(*args, scale=0.2)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_decode_and_its_oracle_match_a_softmax_written_out_in_numpy(make_paged, make_queries):
    k, v, tables = make_paged([70], kv_heads=1, head_dim=8)
    args = (make_queries(1, 2, 8), k, v, tables, jnp.array([70], jnp.int32))
    flat_keys = np.concatenate([np.array(k)[page, 0] for page in tables[0, :2]])[:70]
    flat_values = np.concatenate([np.array(v)[page, 0] for page in tables[0, :2]])[:70]
    for head in range(2):
        weights = np.exp(0.5 * flat_keys @ np.array(args[0])[0, head])
        want = weights @ flat_values / weights.sum()
        for function in (decode, decode_oracle):
            np.testing.assert_allclose(function(*args, scale=0.5)[0, head], want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("start", "num", "padded", "head_dim"),
    [
        (0, 1, 64, 32),
        (0, 64, 64, 32),
        (65, 63, 64, 128),
        (64, 0, 64, 32),
        (0, 300, 320, 32),
        (200, 130, 256, 256),
    ],
)
def test_prefill_matches_the_oracle(start, num, padded, head_dim, make_paged, make_queries):
    k, v, tables = make_paged([start + num], head_dim=head_dim)
    args = (make_queries(padded, 6, head_dim), k, v, tables[0], jnp.int32(start), jnp.int32(num))
    got = prefill(*args, scale=head_dim**-0.5)
    assert np.isfinite(got).all(), "padding must stay finite too"
    want = prefill_oracle(*args, scale=head_dim**-0.5)
    np.testing.assert_allclose(got[:num], want[:num], atol=TOLERANCE, rtol=0)


def test_a_decode_step_equals_the_last_query_of_a_prefill(make_paged, make_queries):
    k, v, tables = make_paged([190])
    q = make_queries(64, 8, 32)
    chunk = prefill(q, k, v, tables[0], jnp.int32(150), jnp.int32(40), scale=0.2)
    step = decode(q[39:40], k, v, tables, jnp.array([190], jnp.int32), scale=0.2)
    np.testing.assert_allclose(step[0], chunk[39], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("garbage", [-1, 2**30])
def test_table_entries_behind_the_length_may_hold_anything(garbage, make_paged, make_queries):
    k, v, tables = make_paged([100])
    spoiled = jnp.where(jnp.arange(tables.shape[1]) < 2, tables, garbage)
    lengths = jnp.array([100], jnp.int32)
    q = make_queries(1, 4, 32)
    want = decode(q, k, v, tables, lengths, scale=0.2)
    np.testing.assert_array_equal(decode(q, k, v, spoiled, lengths, scale=0.2), want)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 widens bfloat16 pools on CPU; they are float32 there"
)
def test_bfloat16_pools_are_read_without_a_widened_copy(make_paged, make_queries):
    k, v, tables = make_paged([130], dtype="bfloat16")
    k, v = (jnp.concatenate([pool, jnp.zeros((2048, *pool.shape[1:]), pool.dtype)]) for pool in (k, v))
    args = (make_queries(1, 4, 32, dtype="bfloat16"), k, v, tables, jnp.array([130], jnp.int32))
    compiled = decode.lower(*args, scale=0.2).compile()
    # Pools of 16 MiB each; a widened copy alone would be 32 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    want = decode_oracle(*args, scale=0.2).astype(jnp.float32)
    # One rounding of the result to bfloat16.
    np.testing.assert_allclose(decode(*args, scale=0.2).astype(jnp.float32), want, atol=4e-3, rtol=0)


def test_memory_does_not_grow_with_the_width_of_the_table():
    def temp_bytes(width: int) -> int:
        shapes = [
            jax.ShapeDtypeStruct((4, 8, 32), jnp.float32),
            jax.ShapeDtypeStruct((64, 2, 64, 32), jnp.float32),
            jax.ShapeDtypeStruct((64, 2, 64, 32), jnp.float32),
            jax.ShapeDtypeStruct((4, width), jnp.int32),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        ]
        compiled = decode.lower(*shapes, scale=0.2).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Only the table itself may grow: 4 rows of 4-byte ids, twice at most.
    assert temp_bytes(4096) - temp_bytes(16) <= 2 * 4 * 4 * 4096
