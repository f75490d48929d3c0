"""Inference for Qwen3.5 hybrid models, with a planner that decides what context to keep."""

from typing import Any

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
    "__version__",
]

__version__: str


def __getattr__(name: str) -> Any:
    """Returns ``__version__``, read from the installed package's metadata when somebody asks."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("ninfer-jax")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"  # a checkout on the path: no release can be named
