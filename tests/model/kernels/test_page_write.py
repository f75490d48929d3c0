"""Page contents move to the right place, in place, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model.kernels.page_write import copy_pages, pack_pages, unpack_pages, write_tokens

DTYPES = ["float32", "bfloat16"]


def pool(num_pages=6, *, kv_heads=2, head_dim=8, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return jnp.array(rng.standard_normal((num_pages, kv_heads, 64, head_dim)), dtype)


def ids(*values):
    return jnp.array(values, jnp.int32)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_land_at_their_page_and_offset_and_nowhere_else(dtype):
    pages = pool(dtype=dtype)
    new = jnp.array(np.random.default_rng(1).standard_normal((4, 2, 8)), dtype)
    want = np.array(pages)
    want[3, :, 63], want[1, :, 0], want[3, :, 7] = new[0], new[1], new[3]
    # The third token is padding: its page id is the size of the pool.
    same(write_tokens(pages, new, ids(3, 1, 6, 3), ids(63, 0, 5, 7)), want)


@pytest.mark.parametrize("page_id", [6, 2**31 - 1, -1, -6])
def test_an_id_out_of_range_writes_nothing(page_id):
    pages = pool()
    same(write_tokens(pages, jnp.ones((1, 2, 8)), ids(page_id), ids(0)), pages)


def test_writing_casts_to_the_dtype_of_the_pool():
    pages = write_tokens(pool(dtype="bfloat16"), jnp.full((1, 2, 8), 1.2345), ids(2), ids(9))
    assert pages.dtype == jnp.bfloat16
    same(pages[2, :, 9], jnp.full((2, 8), 1.2345, jnp.bfloat16))


@pytest.mark.parametrize(
    ("new", "page_ids", "offsets", "message"),
    [
        ((3, 2, 4), (3,), (3,), r"new has shape \(3, 2, 4\); expected \[T, 2, 8\]"),
        ((3, 2, 8), (2,), (2,), "new has shape"),
        ((3, 2, 8), (3,), (2,), r"offsets has shape \(2,\)"),
    ],
)
def test_writing_names_what_does_not_fit(new, page_ids, offsets, message):
    with pytest.raises(ValueError, match=message):
        write_tokens(pool(), jnp.zeros(new), jnp.zeros(page_ids, jnp.int32), jnp.zeros(offsets, jnp.int32))


def test_copies_read_every_source_before_they_write():
    pages = pool()
    swapped = copy_pages(pages, ids(2, 5, 0), ids(5, 2, 6))
    want = np.array(pages)
    want[[2, 5]] = want[[5, 2]]
    same(swapped, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_group_comes_back_at_other_ids(dtype):
    ks = tuple(pool(dtype=dtype, seed=layer) for layer in range(3))
    vs = tuple(pool(dtype=dtype, seed=layer + 10) for layer in range(3))
    # The last id pads the group: packed as something, dropped on the way back.
    packed = pack_pages(ks, vs, ids(4, 1, 6))
    assert packed.shape == (3, 2, 3, 2, 64, 8)
    same(packed[1, 0, 0], ks[1][4])
    same(packed[2, 1, 1], vs[2][1])

    blank = tuple(jnp.zeros_like(k) for k in ks)
    new_k, new_v = unpack_pages(blank, blank, packed, ids(0, 5, 6))
    for layer in range(3):
        for new, old in ((new_k[layer], ks[layer]), (new_v[layer], vs[layer])):
            want = np.zeros_like(np.array(old))
            want[0], want[5] = old[4], old[1]
            same(new, want)


def test_unpacking_names_what_does_not_fit():
    ks = (pool(), pool())
    packed = pack_pages(ks, ks, ids(1, 2))
    with pytest.raises(ValueError, match=r"packed is float32\[2, 2, 2, .*expected float32\[2, 2, 3, "):
        unpack_pages(ks, ks, packed, ids(1, 2, 3))
    with pytest.raises(ValueError, match="got 2 K pools and 1 V pools"):
        pack_pages(ks, ks[:1], ids(1))
    with pytest.raises(ValueError, match="layers of different shape are packed apart"):
        pack_pages(ks, (ks[0], pool(7)), ids(1))


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param(
            "bfloat16",
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11),
                reason="jax 0.10 widens bfloat16 pools on CPU; they are float32 there",
            ),
        ),
    ],
)
def test_donated_pools_are_updated_in_place(dtype):
    """Pointer equality proves nothing (a pool may be copied out and back); the compiler's plan does."""
    pages = jax.ShapeDtypeStruct((512, 2, 64, 64), dtype)
    pool_bytes = 512 * 2 * 64 * 64 * jnp.dtype(dtype).itemsize
    group = jax.ShapeDtypeStruct((8,), jnp.int32)
    new = jax.ShapeDtypeStruct((8, 2, 64), dtype)
    packed = jax.ShapeDtypeStruct((2, 2, 8, 2, 64, 64), dtype)

    plans = {
        "write": jax.jit(write_tokens, donate_argnums=0).lower(pages, new, group, group),
        "copy": jax.jit(copy_pages, donate_argnums=0).lower(pages, group, group),
        "unpack": jax.jit(unpack_pages, donate_argnums=(0, 1)).lower([pages] * 2, [pages] * 2, packed, group),
    }
    num_pools = {"write": 1, "copy": 1, "unpack": 4}
    for name, lowered in plans.items():
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == num_pools[name] * pool_bytes, name
        # At most the group in flight (8 of 512 pages) and small change.
        assert memory.temp_size_in_bytes <= num_pools[name] * pool_bytes // 64 + 2**16, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_needs_no_memory_besides_its_result(dtype):
    pages = [jax.ShapeDtypeStruct((512, 2, 64, 64), dtype)] * 2
    memory = jax.jit(pack_pages).lower(pages, pages, jax.ShapeDtypeStruct((8,), jnp.int32)).compile()
    group_bytes = 2 * 2 * 8 * 2 * 64 * 64 * jnp.dtype(dtype).itemsize
    assert memory.memory_analysis().output_size_in_bytes == group_bytes
    assert memory.memory_analysis().temp_size_in_bytes <= group_bytes + 2**16
