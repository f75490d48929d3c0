"""The GPU kernels against the oracles in the GPU interpreter: copies, barriers, indexing and races (T-4).

The interpreter is slow (seconds a case); the default suite takes the corners, `-m slow` the grid.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model.kernels import _mgpu_compat as mgpu
from ninfer_jax.model.kernels.mosaic_decode import decode_mosaic
from ninfer_jax.model.kernels.mosaic_prefill import prefill_mosaic
from ninfer_jax.model.kernels.reference import decode_attention_reference, prefill_attention_reference

# Weights are rounded to bfloat16 before they meet V, and the result once more: two steps of 2**-8 of about 1.
TOLERANCE = 8e-3
SCALE = 0.1


@pytest.fixture
def interpret():
    yield mgpu.interpret_params(detect_races=True)
    mgpu.reset_interpreter()


def check_decode(lengths, *, kv_heads, group, head_dim, splits, interpret, make_paged, make_queries):
    k, v, tables = make_paged(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16", tail=0.0)
    q = make_queries(len(lengths), kv_heads * group, head_dim, dtype="bfloat16")
    args = (q, k, v, tables, jnp.array(lengths, jnp.int32))
    got = jax.jit(lambda *a: decode_mosaic(*a, scale=SCALE, splits=splits, interpret=interpret))(*args)
    want = jax.jit(partial(decode_attention_reference, scale=SCALE))(*args)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=TOLERANCE, rtol=0
    )
    for row, length in enumerate(lengths):
        if length == 0:
            assert not np.asarray(got[row], np.float32).any()


def check_prefill(start, num, padded, *, kv_heads, group, head_dim, interpret, make_paged, make_queries):
    k, v, tables = make_paged([start + num], kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16", tail=0.0)
    q = make_queries(padded, kv_heads * group, head_dim, dtype="bfloat16")
    args = (q, k, v, tables[0], jnp.int32(start), jnp.int32(num))
    got = jax.jit(lambda *a: prefill_mosaic(*a, scale=SCALE, interpret=interpret))(*args)
    got = np.asarray(got, np.float32)
    assert np.isfinite(got).all(), "padding must stay finite too"
    want = np.asarray(jax.jit(partial(prefill_attention_reference, scale=SCALE))(*args), np.float32)
    np.testing.assert_allclose(got[:num], want[:num], atol=TOLERANCE, rtol=0)


def assert_no_races(capfd):
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err


def test_decode_of_all_border_lengths(interpret, make_paged, make_queries, capfd):
    check_decode(
        [0, 1, 63, 64, 65], kv_heads=1, group=3, head_dim=128, splits=2,
        interpret=interpret, make_paged=make_paged, make_queries=make_queries,
    )  # fmt: skip
    assert_no_races(capfd)


def test_decode_at_the_head_size_of_the_model(interpret, make_paged, make_queries, capfd):
    # Four pages in one split: every stage buffer is used twice.
    check_decode(
        [250], kv_heads=2, group=6, head_dim=256, splits=1,
        interpret=interpret, make_paged=make_paged, make_queries=make_queries,
    )  # fmt: skip
    assert_no_races(capfd)


def test_prefill_in_the_middle_of_a_page(interpret, make_paged, make_queries, capfd):
    # Four pages, so stage buffers are used twice; 60 queries of the second warpgroup are padding.
    check_prefill(
        130, 68, 128, kv_heads=1, group=1, head_dim=128,
        interpret=interpret, make_paged=make_paged, make_queries=make_queries,
    )  # fmt: skip
    assert_no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_decode_of_every_group(group, head_dim, interpret, make_paged, make_queries, capfd):
    check_decode(
        [0, 1, 63, 64, 65, 300], kv_heads=1, group=group, head_dim=head_dim, splits=2,
        interpret=interpret, make_paged=make_paged, make_queries=make_queries,
    )  # fmt: skip
    assert_no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(
    ("start", "num", "padded"),
    [(0, 1, 64), (0, 64, 64), (1, 63, 64), (64, 65, 128), (100, 130, 256), (64, 0, 64)],
)
def test_prefill_of_every_border(
    start, num, padded, head_dim, group, interpret, make_paged, make_queries, capfd
):
    check_prefill(
        start, num, padded, kv_heads=1, group=group, head_dim=head_dim,
        interpret=interpret, make_paged=make_paged, make_queries=make_queries,
    )  # fmt: skip
    assert_no_races(capfd)
