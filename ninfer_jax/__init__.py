"""Inference for Qwen3.5 hybrid models, with a planner that decides what context to keep."""

from ninfer_jax.engine import Engine
from ninfer_jax.errors import (
    EngineClosedError,
    NinferError,
    OptionError,
    PromptError,
    RequestError,
    RequestErrorKind,
)
from ninfer_jax.handle import RequestHandle
from ninfer_jax.options import ContextCacheOptions, EngineOptions
from ninfer_jax.results import Finished, GenerationResult, GenerationStart, TextDelta
from ninfer_jax.sampling_params import SamplingParams

__all__ = [
    "ContextCacheOptions",
    "Engine",
    "EngineClosedError",
    "EngineOptions",
    "Finished",
    "GenerationResult",
    "GenerationStart",
    "NinferError",
    "OptionError",
    "PromptError",
    "RequestError",
    "RequestErrorKind",
    "RequestHandle",
    "SamplingParams",
    "TextDelta",
]
