"""Qwen3.5 in Flax: weights in, logits and a new cache out. Knows no request and no plan."""

from ninfer_jax.model.cache import PAGE_TOKENS, Cache, CacheSpec, make_cache, make_cache_spec
from ninfer_jax.model.config import MoEConfig, Qwen35Config, load_config
from ninfer_jax.model.errors import CheckpointError
from ninfer_jax.model.loader import LoadedModel, load_model, param_bytes
from ninfer_jax.model.transformer import (
    DecodeBatch,
    PrefillChunk,
    Qwen35,
    decode_step,
    full_logits,
    logits_from_tail,
    prefill_chunk,
)

__all__ = [
    "PAGE_TOKENS",
    "Cache",
    "CacheSpec",
    "CheckpointError",
    "DecodeBatch",
    "LoadedModel",
    "MoEConfig",
    "PrefillChunk",
    "Qwen35",
    "Qwen35Config",
    "decode_step",
    "full_logits",
    "load_config",
    "load_model",
    "logits_from_tail",
    "make_cache",
    "make_cache_spec",
    "param_bytes",
    "prefill_chunk",
]
