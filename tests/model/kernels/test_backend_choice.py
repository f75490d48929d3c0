"""Which attention kernels a model gets follows from facts alone, and a whole step lowers with them (T-4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ninfer_jax.model.cache import make_cache, make_cache_spec
from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.kernels.paged_attention import supports_mosaic
from ninfer_jax.model.transformer import DecodeBatch, PrefillChunk, Qwen35, decode_step, prefill_chunk

H200 = {
    "platform": "gpu",
    "compute_capability": "9.0",
    "dtype": "bfloat16",
    "num_query_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 256,
}


@pytest.mark.parametrize("change", [{}, {"dtype": "float16"}, {"head_dim": 128}, {"num_query_heads": 256}])
def test_a_hopper_gpu_runs_its_own_kernels(change):
    assert supports_mosaic(**{**H200, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"platform": "cpu", "compute_capability": None},
        {"platform": "tpu"},
        {"compute_capability": None},
        {"compute_capability": "8.9"},
        {"compute_capability": "10.0"},  # has other tensor-core instructions
        {"dtype": "float32"},
        {"head_dim": 80},
        {"head_dim": 512},
        {"num_query_heads": 260},
    ],
)
def test_everything_else_runs_the_portable_loop(change):
    assert not supports_mosaic(**{**H200, **change})


CONFIG = Qwen35Config.from_hf(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
    }
)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_whole_step_with_gpu_kernels_lowers_for_cuda(step):
    spec = make_cache_spec(CONFIG, "bfloat16")
    cache = jax.eval_shape(lambda: make_cache(spec, 8, 3))
    if step == "decode":
        run, batch = decode_step, DecodeBatch(int32(3), int32(3, 3), int32(3, 4), *[int32(3)] * 3)
    else:
        run, batch = prefill_chunk, PrefillChunk(int32(64), int32(3, 64), int32(4), *[int32()] * 4)

    def whole(cache, batch):
        return run(Qwen35(CONFIG, jnp.bfloat16), cache, batch, backend="mosaic")

    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 1, "cuda"))
    with use_abstract_mesh(mesh):
        text = jax.jit(whole).trace(cache, batch).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
