"""The contract of the two public attention functions: what they refuse, and which backend answers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model.kernels.paged_attention import decode_attention, prefill_attention
from ninfer_jax.model.kernels.reference import decode_attention_reference, prefill_attention_reference

INT32 = jnp.int32


def decode_args(**changes):
    args = {
        "q": jax.ShapeDtypeStruct((3, 8, 128), jnp.bfloat16),
        "k_pages": jax.ShapeDtypeStruct((16, 2, 64, 128), jnp.bfloat16),
        "v_pages": jax.ShapeDtypeStruct((16, 2, 64, 128), jnp.bfloat16),
        "block_tables": jax.ShapeDtypeStruct((3, 4), INT32),
        "lengths": jax.ShapeDtypeStruct((3,), INT32),
    }
    return args | {name: jax.ShapeDtypeStruct(*value) for name, value in changes.items()}


def prefill_args(**changes):
    args = {
        "q": jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16),
        "k_pages": jax.ShapeDtypeStruct((16, 2, 64, 128), jnp.bfloat16),
        "v_pages": jax.ShapeDtypeStruct((16, 2, 64, 128), jnp.bfloat16),
        "block_table": jax.ShapeDtypeStruct((4,), INT32),
        "start_tokens": jax.ShapeDtypeStruct((), INT32),
        "num_tokens": jax.ShapeDtypeStruct((), INT32),
    }
    return args | {name: jax.ShapeDtypeStruct(*value) for name, value in changes.items()}


def trace(function, args, backend="xla"):
    return jax.eval_shape(lambda a: function(**a, scale=0.1, backend=backend), args)


def pools(shape, dtype=jnp.bfloat16):
    return {"k_pages": (shape, dtype), "v_pages": (shape, dtype)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ((3, 128), jnp.bfloat16)}, r"q has shape \(3, 128\); expected \[rows"),
        ({"q": ((3, 8, 64), jnp.bfloat16)}, "q has head_dim 64; expected 128"),
        ({"q": ((3, 7, 128), jnp.bfloat16)}, "q has 7 heads; expected a multiple of the 2 KV heads"),
        ({"q": ((3, 8, 128), jnp.int32)}, "q is int32; expected a float"),
        (pools((16, 2, 32, 128)), "pages hold 32 tokens; expected 64"),
        ({"v_pages": ((16, 2, 64, 64), jnp.bfloat16)}, "k_pages has shape .* and v_pages"),
        ({"v_pages": ((16, 2, 64, 128), jnp.float32)}, "k_pages is bfloat16 and v_pages float32"),
        (pools((16, 2, 64, 128), jnp.int8), "k_pages is int8; expected a float"),
        ({"block_tables": ((2, 4), INT32)}, r"block_tables is int32\[2, 4\]; expected int32\[3, table"),
        ({"block_tables": ((3, 4), jnp.int16)}, "block_tables is int16"),
        ({"lengths": ((4,), INT32)}, r"lengths is int32\[4\]; expected int32\[3\]"),
    ],
)
def test_decode_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        trace(decode_attention, decode_args(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ((8, 128), jnp.bfloat16)}, r"q has shape \(8, 128\); expected \[tokens"),
        ({"block_table": ((1, 4), INT32)}, r"block_table is int32\[1, 4\]; expected int32\[table width\]"),
        ({"start_tokens": ((1,), INT32)}, r"start_tokens is int32\[1\]; expected an int32 scalar"),
        ({"num_tokens": ((), jnp.float32)}, r"num_tokens is float32\[\]"),
    ],
)
def test_prefill_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        trace(prefill_attention, prefill_args(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ((3, 8, 128), jnp.float32)}, "q is float32 and the pages bfloat16; .* use bfloat16"),
        ({"q": ((3, 8, 96), jnp.bfloat16)} | pools((16, 2, 64, 96)), "head_dim is 96; .* or use 'xla'"),
        ({"q": ((3, 130, 128), jnp.bfloat16)}, "65 query heads share a KV head"),
    ],
)
def test_the_mosaic_backend_says_what_it_cannot_hold_and_xla_takes_it(changes, message):
    with pytest.raises(ValueError, match=message):
        trace(decode_attention, decode_args(**changes), backend="mosaic")
    assert trace(decode_attention, decode_args(**changes)).shape == decode_args(**changes)["q"].shape


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend is 'triton'; expected 'xla' or 'mosaic'"):
        trace(decode_attention, decode_args(), backend="triton")


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_both_backends_keep_shape_and_dtype(backend):
    assert trace(decode_attention, decode_args(), backend) == decode_args()["q"]
    assert trace(prefill_attention, prefill_args(), backend) == prefill_args()["q"]


def test_the_default_backend_computes_the_reference(make_paged, make_queries):
    k, v, tables = make_paged([90, 5])
    lengths = jnp.array([90, 5], jnp.int32)
    q = make_queries(2, 4, 32)
    rows = (q, k, v, tables, lengths)
    chunk = (make_queries(20, 4, 32), k, v, tables[0], jnp.int32(70), jnp.int32(20))
    for function, oracle, args in (
        (decode_attention, decode_attention_reference, rows),
        (prefill_attention, prefill_attention_reference, chunk),
    ):
        got, want = (jax.jit(partial(f, scale=0.2))(*args) for f in (function, oracle))
        # float32 sums in another order.
        np.testing.assert_allclose(got, want, atol=3e-6, rtol=0)
