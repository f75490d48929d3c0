"""Puts the parts of one engine together: device, options, config, capacity, weights, frontend, program.

Owns the order: everything that can be refused is refused before any weight is read. It runs nothing and
starts no thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib import resources
from pathlib import Path
from typing import Any

import jax

from ninfer_jax.compile_cache import compile_cache_directory
from ninfer_jax.errors import OptionError
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.loader import load_model, load_settled_config
from ninfer_jax.options import PAGE_TOKENS, EngineOptions, ResolvedOptions, make_engine_options, resolve
from ninfer_jax.parts import EngineParts, ModelFacts
from ninfer_jax.plan_trace import PlanTrace
from ninfer_jax.program.compilation import use_compilation_cache
from ninfer_jax.program.opening import open_program, size_program
from ninfer_jax.program.sizing import SizingOptions, SizingPlan
from ninfer_jax.request_log import RequestLog

DEMO = "demo"


@dataclass(frozen=True, eq=False)
class Blueprint:
    """Everything decided before a weight is read."""

    directory: Path
    source: str
    device: jax.Device
    config: Qwen35Config
    options: ResolvedOptions
    prefill_chunk_tokens: int
    sizing: SizingPlan


def draw_up(path: str | Path, options: EngineOptions | None, changes: Mapping[str, Any]) -> Blueprint:
    """Returns the checked plan of an engine; reads config and tensor headers, no weight.

    Raises:
        OptionError: if an option is wrong or the capacity cannot fit, naming what would.
        ValueError: if the checkpoint's config is unsupported.
    """
    base = make_engine_options(options, **changes)
    device = pick_device(base.device)
    directory = checkpoint_directory(path)
    config = load_settled_config(directory, load_format=base.load_format)
    resolved = resolve(base, platform=device.platform, model_max_context=config.max_position_embeddings)
    # a longer chunk than the context could never be filled, and its program would only cost compile time
    chunk = min(resolved.prefill_chunk, -(-resolved.max_context // PAGE_TOKENS) * PAGE_TOKENS)
    sizing = size_program(
        config,
        SizingOptions(
            max_context_tokens=resolved.max_context,
            max_concurrency=resolved.max_concurrency,
            kv_capacity_tokens=None if resolved.kv_capacity == "auto" else resolved.kv_capacity,
            device_state_slots=resolved.cache.device_state_slots,
            host_state_slots=resolved.cache.host_state_slots,
            host_kv_bytes=resolved.cache.host_kv_capacity_bytes,
            keeps_context=resolved.cache.enabled,
            headroom_bytes=resolved.kv_headroom_bytes,
        ),
        dtype=resolved.dtype,
        prefill_chunk_tokens=chunk,
        device=device,
    )
    return Blueprint(
        directory=directory,
        source=str(path),
        device=device,
        config=config,
        options=resolved,
        prefill_chunk_tokens=chunk,
        sizing=sizing,
    )


def assemble(path: str | Path, options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineParts:
    """Returns the parts of an engine for a checkpoint, loaded, compiled and warm.

    Args:
        path: a Hugging Face directory, or ``"demo"``.
        options: base options, default ``EngineOptions()``.
        changes: fields replaced by name.
    Raises:
        OptionError, ValueError: as ``draw_up``; also if weights or tokenizer are incomplete.
    """
    plan = draw_up(path, options, changes)
    resolved = plan.options
    if resolved.request_log is not None:
        RequestLog(resolved.request_log).close()  # refused here, not after the weights
    if resolved.trace_plans is not None:
        PlanTrace(resolved.trace_plans)
    cache_directory = compile_cache_directory(
        resolved.compilation_cache_dir, jax.config.jax_compilation_cache_dir, jax.__version__
    )
    if cache_directory is not None:
        use_compilation_cache(cache_directory)
    frontend = Frontend.from_directory(plan.directory, vocab_size=plan.config.vocab_size)
    with jax.default_device(plan.device):
        model = load_model(
            plan.directory, dtype=resolved.dtype, load_format=resolved.load_format, seed=resolved.seed
        )
        program = open_program(
            model,
            plan.sizing,
            prefill_chunk_tokens=plan.prefill_chunk_tokens,
            eos_token_ids=frontend.eos_token_ids,
            allowed_vocab_size=frontend.allowed_vocab_size,
        )
    return EngineParts(options=resolved, frontend=frontend, program=program, model=model_facts(plan))


def checkpoint_directory(path: str | Path) -> Path:
    """Returns the folder of a checkpoint; ``"demo"`` is the embedded one.

    Raises:
        OptionError: if there is no such folder.
    """
    if str(path) == DEMO:
        return Path(str(resources.files("ninfer_jax"))) / "assets" / "demo"
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise OptionError(
            f"model: got {str(path)!r}, expected a Hugging Face directory, or 'demo'; nothing is downloaded"
        )
    return directory


def pick_device(name: str | None) -> jax.Device:
    """Returns the device named ``"cpu"``, ``"gpu"`` or ``"gpu:1"``; JAX's first one for None.

    Raises:
        OptionError: if this machine has no such device.
    """
    if name is None:
        return jax.devices()[0]
    kind, _, number = name.partition(":")
    try:
        devices = jax.devices(kind)
        index = int(number or 0)
    except (RuntimeError, ValueError) as error:
        here = ", ".join(str(device) for device in jax.devices())
        raise OptionError(
            f"device: got {name!r}, expected a kind such as 'cpu' or 'gpu:0'; here: {here}"
        ) from error
    if not 0 <= index < len(devices):
        raise OptionError(f"device: got {name!r}, expected {kind}:0..{kind}:{len(devices) - 1}")
    return devices[index]


def _digest_of(directory: Path, *names: str) -> str:
    """Returns a digest of the files of these names that are there."""
    digest = blake2b(digest_size=16)
    for path in (directory / name for name in names):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def model_facts(plan: Blueprint) -> ModelFacts:
    """Returns what reports say about the model."""
    config = plan.config
    return ModelFacts(
        source=plan.source,
        signature=config.signature,
        num_layers=config.num_hidden_layers,
        num_full_attention_layers=len(config.full_layers),
        is_moe=config.moe is not None,
        vocab_size=config.vocab_size,
        dtype=plan.options.dtype,
        device=f"{plan.device.device_kind} ({plan.device})",
        tokenizer_digest=_digest_of(plan.directory, "tokenizer.json"),
        template_digest=_digest_of(plan.directory, "chat_template.jinja", "tokenizer_config.json"),
    )
