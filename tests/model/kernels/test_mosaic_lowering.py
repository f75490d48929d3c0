"""The GPU kernels lower for CUDA without a GPU, which checks layouts and shared memory (T-4)."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ninfer_jax.model.kernels.mosaic_decode import split_count
from ninfer_jax.model.kernels.paged_attention import decode_attention, prefill_attention

BF16 = jnp.bfloat16


def lower_for_cuda(function, *shapes) -> str:
    """The recipe that both jax versions accept: 0.11 wants to know the device, 0.10 does not mind."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 1, "cuda"))
    with use_abstract_mesh(mesh):
        traced = jax.jit(lambda *a: function(*a, scale=0.0625, backend="mosaic")).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def pages(kv_heads, head_dim):
    return [jax.ShapeDtypeStruct((64, kv_heads, 64, head_dim), BF16)] * 2


@pytest.mark.parametrize(("head_dim", "group"), [(256, 6), (256, 8), (128, 1), (128, 16)])
def test_decode_lowers_for_cuda(head_dim, group):
    q = jax.ShapeDtypeStruct((3, 2 * group, head_dim), BF16)
    text = lower_for_cuda(decode_attention, q, *pages(2, head_dim), int32(3, 9), int32(3))
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("head_dim", "tokens"), [(256, 1024), (128, 64)])
def test_prefill_lowers_for_cuda(head_dim, tokens):
    q = jax.ShapeDtypeStruct((tokens, 12, head_dim), BF16)
    text = lower_for_cuda(prefill_attention, q, *pages(2, head_dim), int32(40), int32(), int32())
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("rows", "kv_heads", "table_pages", "splits"),
    [(1, 4, 128, 33), (8, 4, 128, 4), (1, 4, 5, 5), (64, 8, 128, 1)],
)
def test_splits_fill_one_wave_of_blocks_and_never_exceed_the_pages(rows, kv_heads, table_pages, splits):
    assert split_count(rows, kv_heads, table_pages) == splits
