"""A step updates the cache where it lies: proved by the compiler's own account, not by pointers (K-9)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ninfer_jax.model import DecodeBatch, decode_step, make_cache, make_cache_spec, prefill_chunk
from ninfer_jax.model import cache as cache_module

NUM_PAGES, NUM_SLOTS, WIDTH = 600, 400, 8


@pytest.fixture(scope="module")
def sized(small_model):
    model = small_model("dense")
    spec = make_cache_spec(model.config, "float32")
    abstract = jax.eval_shape(lambda: make_cache(spec, NUM_PAGES, NUM_SLOTS))
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    return model, spec, abstract, cache_bytes


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compiled(step, model, cache, work):
    def run(leaves, cache, work):
        return step(model.module(leaves), cache, work)

    return jax.jit(run, donate_argnames=("cache",)).lower(model.leaves, cache, work).compile()


def largest_layer_bytes(cache):
    return max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def test_spec_prices_exactly_what_is_allocated(sized):
    _, spec, _, cache_bytes = sized
    assert cache_bytes == NUM_PAGES * spec.page_bytes + NUM_SLOTS * spec.state_image_bytes


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_copies_no_pool(rows, sized):
    model, _, cache, cache_bytes = sized
    batch = DecodeBatch(ints(rows), ints(3, rows), ints(rows, WIDTH), ints(rows), ints(rows), ints(rows))
    memory = compiled(decode_step, model, cache, batch).memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < largest_layer_bytes(cache) / 2


def test_prefill_copies_no_pool(sized, dense_server):
    model, _, cache, cache_bytes = sized
    chunk = jax.eval_shape(lambda: dense_server.chunk([1], 0, pages=range(WIDTH), read=0, write=0, bucket=64))
    memory = compiled(prefill_chunk, model, cache, chunk).memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < largest_layer_bytes(cache) / 2


def test_the_package_keeps_no_state_in_variables():
    """A Variable changed inside a step would be dropped silently, so there must be none but parameters."""
    folder = Path(cache_module.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert "nnx.Variable" not in text, path
        assert "nnx.Cache" not in text, path
