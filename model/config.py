"""Owns the geometry of one Qwen3.5 text model and how it is read from a Hugging Face config.

It knows no weights: which tensors a geometry implies is `weights.py`, what they cost is `loader.param_bytes`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ninfer_jax.model.errors import CheckpointError

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

DENSE_MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
MOE_MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")

# What transformers assumes for a field that a config leaves out; (dense, moe) where they differ.
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "vocab_size": (248320, 248320),
    "hidden_size": (4096, 2048),
    "intermediate_size": (12288, None),
    "num_hidden_layers": (32, 40),
    "num_attention_heads": (16, 16),
    "num_key_value_heads": (4, 2),
    "head_dim": (256, 256),
    "rms_norm_eps": (1e-6, 1e-6),
    "linear_conv_kernel_dim": (4, 4),
    "linear_key_head_dim": (128, 128),
    "linear_value_head_dim": (128, 128),
    "linear_num_key_heads": (16, 16),
    "linear_num_value_heads": (32, 32),
    "full_attention_interval": (4, 4),
    "max_position_embeddings": (32768, 32768),
    "moe_intermediate_size": (None, 512),
    "shared_expert_intermediate_size": (None, 512),
    "num_experts": (None, 256),
    "num_experts_per_tok": (None, 8),
}
# Far above any model, and low enough that no product of three sizes leaves 64-bit arithmetic.
_MAX_SIZE = 2**20
_MAX_VOCAB = 2**31 - 1  # token ids are int32
_MAX_LAYERS = 4096
_LARGEST_REAL = 1e30  # the arithmetic is float32
_LARGEST = {"vocab_size": _MAX_VOCAB, "max_position_embeddings": 2**53, "num_hidden_layers": _MAX_LAYERS}

_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_PARTIAL_ROTARY = 0.25
_DEFAULT_MROPE_SECTION = (11, 11, 10)


@dataclass(frozen=True)
class MoEConfig:
    """Widths of the sparse feed-forward block that replaces the dense one in every layer."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int


@dataclass(frozen=True)
class Qwen35Config:
    """Everything that decides the shapes and the arithmetic of one text model. Hashable, no arrays."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]  # LINEAR_ATTENTION or FULL_ATTENTION, one per layer
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int  # leading components of a head that are rotated
    rope_theta: float
    mrope_section: tuple[int, int, int]  # frequencies driven by the T, H and W position rows
    rms_norm_eps: float
    intermediate_size: int | None  # None in MoE models
    moe: MoEConfig | None
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL_ATTENTION)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: all query, key and value components of a linear layer."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_value_width

    @property
    def linear_value_width(self) -> int:
        """Value components of a linear layer over all heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def signature(self) -> str:
        """A digest equal exactly for equal geometries, stable across processes and Python versions."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:16]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Qwen35Config:
        """Returns the text geometry of a parsed `config.json`, flat or nested under `text_config`.

        Args:
            raw: the parsed JSON object. Unknown fields are ignored; missing ones get transformers' defaults.
        Raises:
            CheckpointError: if the architecture is not Qwen3.5, a feature is not supported, or sizes
                contradict each other. Every problem found is in the one message.
        """
        return _read_config(raw)


def load_config(directory: str | Path) -> Qwen35Config:
    """Returns the geometry of the checkpoint in a Hugging Face directory.

    Args:
        directory: a directory with a `config.json`.
    Raises:
        CheckpointError: if the file is missing, is not JSON, or describes a model that is not supported.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"no config.json in {directory}: expected a Hugging Face checkpoint directory")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object")
    return Qwen35Config.from_hf(raw)


def _read_config(raw: Mapping[str, Any]) -> Qwen35Config:
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"text_config is {type(text).__name__}, expected an object")
    is_moe = _is_moe(raw, text)

    def get(name: str) -> Any:
        value = text.get(name)
        return _DEFAULTS[name][is_moe] if value is None else value

    def size(name: str) -> int:
        value = get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config field {name} is {value!r}, expected a positive integer")
        largest = _LARGEST.get(name, _MAX_SIZE)
        if value > largest:
            raise CheckpointError(f"config field {name} is {value}, expected at most {largest}")
        return value

    rope = _rope_parameters(text)
    head_dim, rope_theta = size("head_dim"), _positive("rope_theta", rope.rope_theta)
    rotary_dim = int(head_dim * _positive("partial_rotary_factor", rope.partial_rotary_factor))
    moe = (
        MoEConfig(
            num_experts=size("num_experts"),
            num_experts_per_tok=size("num_experts_per_tok"),
            moe_intermediate_size=size("moe_intermediate_size"),
            shared_expert_intermediate_size=size("shared_expert_intermediate_size"),
        )
        if is_moe
        else None
    )
    config = Qwen35Config(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        num_hidden_layers=size("num_hidden_layers"),
        layer_types=_layer_types(text, size("num_hidden_layers"), size("full_attention_interval")),
        num_attention_heads=size("num_attention_heads"),
        num_key_value_heads=size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        mrope_section=rope.mrope_section,
        rms_norm_eps=_positive("rms_norm_eps", get("rms_norm_eps")),
        intermediate_size=None if is_moe else size("intermediate_size"),
        moe=moe,
        linear_num_key_heads=size("linear_num_key_heads"),
        linear_num_value_heads=size("linear_num_value_heads"),
        linear_key_head_dim=size("linear_key_head_dim"),
        linear_value_head_dim=size("linear_value_head_dim"),
        linear_conv_kernel_dim=size("linear_conv_kernel_dim"),
        tie_word_embeddings=_flag("tie_word_embeddings", raw) or _flag("tie_word_embeddings", text),
        max_position_embeddings=size("max_position_embeddings"),
    )
    problems = [*_unsupported(raw, text, rope), *_contradictions(config, rope)]
    if problems:
        raise CheckpointError("this config cannot be used: " + "; ".join(problems))
    return config


def _is_moe(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    model_type = text.get("model_type") or raw.get("model_type")
    if model_type in MOE_MODEL_TYPES:
        return True
    if model_type in DENSE_MODEL_TYPES:
        return False
    supported = ", ".join(DENSE_MODEL_TYPES + MOE_MODEL_TYPES)
    architectures = raw.get("architectures")
    raise CheckpointError(
        f"unsupported architecture: model_type is {model_type!r} (architectures {architectures!r}), "
        f"expected one of {supported}"
    )


class _Rope(NamedTuple):
    """The rotary fields of a config, wherever they stood; those of any type are checked by their user."""

    rope_theta: Any
    partial_rotary_factor: Any
    rope_type: Any
    rope_type_beside: Any  # of a second object that does not win
    mrope_section: tuple[int, int, int]
    mrope_section_given: bool


def _rope_parameters(text: Mapping[str, Any]) -> _Rope:
    """Returns theta, partial factor, type and sections; the dict wins over fields beside it."""
    scaling = text.get("rope_scaling") or {}
    nested = text.get("rope_parameters") or scaling
    for name, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{name} is {type(value).__name__}, expected an object")

    def get(name: str, default: Any) -> Any:
        for source in (nested, text):
            if source.get(name) is not None:
                return source[name]
        return default

    section = get("mrope_section", None)
    if section is not None and not (
        isinstance(section, list | tuple) and len(section) == 3 and all(map(_is_count, section))
    ):
        raise CheckpointError(f"mrope_section is {section!r}, expected three integers of 0 or more")
    return _Rope(
        rope_theta=get("rope_theta", _DEFAULT_ROPE_THETA),
        partial_rotary_factor=get("partial_rotary_factor", _DEFAULT_PARTIAL_ROTARY),
        rope_type=_rope_type(nested),
        rope_type_beside="default" if nested is scaling else _rope_type(scaling),
        mrope_section=_DEFAULT_MROPE_SECTION if section is None else (section[0], section[1], section[2]),
        mrope_section_given=section is not None,
    )


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _layer_types(text: Mapping[str, Any], num_layers: int, interval: int) -> tuple[str, ...]:
    given = text.get("layer_types")
    if given is None:
        return tuple(
            FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(num_layers)
        )
    if not isinstance(given, list | tuple):
        raise CheckpointError(f"layer_types is {type(given).__name__}, expected a list of layer kinds")
    return tuple(str(kind) for kind in given)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_REAL:
        raise CheckpointError(f"config field {name} is {value!r}, expected a finite number above 0")
    return float(value)


def _flag(name: str, fields: Mapping[str, Any]) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config field {name} is {value!r}, expected true or false")
    return bool(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unsupported(raw: Mapping[str, Any], text: Mapping[str, Any], rope: _Rope) -> list[str]:
    problems = []
    if text.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {text['hidden_act']!r}, only 'silu' is supported")
    if text.get("attention_bias"):
        problems.append("attention_bias is true, Qwen3.5 attention has no bias")
    if text.get("attn_output_gate", True) is not True:
        problems.append("attn_output_gate is false, only gated attention is supported")
    # "mrope" is how early exports spell the default type with sections. A rope_scaling beside rope_parameters
    # counts too: whoever added it wants it applied.
    for kind in (rope.rope_type, rope.rope_type_beside):
        if kind not in ("default", "mrope"):
            problems.append(f"rope_type is {kind!r}, only 'default' is supported (no YaRN)")
    if raw.get("quantization_config") or text.get("quantization_config"):
        problems.append("the weights are quantised, expected float32, bfloat16 or float16 tensors")
    return problems


def _contradictions(config: Qwen35Config, rope: _Rope) -> list[str]:
    problems = []
    if len(config.layer_types) != config.num_hidden_layers:
        problems.append(
            f"layer_types has {len(config.layer_types)} entries "
            f"for num_hidden_layers {config.num_hidden_layers}"
        )
    unknown = sorted(set(config.layer_types) - {LINEAR_ATTENTION, FULL_ATTENTION})
    if unknown:
        problems.append(f"layer_types has unknown kinds {unknown}")
    if not unknown and FULL_ATTENTION not in config.layer_types:
        problems.append("no layer is full_attention, expected at least one")
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, many) % getattr(config, few):
            problems.append(
                f"{many} {getattr(config, many)} is not a multiple of {few} {getattr(config, few)}"
            )
    if not 2 <= config.rotary_dim <= config.head_dim or config.rotary_dim % 2:
        problems.append(
            f"partial_rotary_factor {rope.partial_rotary_factor} of head_dim {config.head_dim} gives "
            f"rotary size {config.rotary_dim}, expected an even size of at most head_dim"
        )
    if rope.mrope_section_given and sum(config.mrope_section) != config.rotary_dim // 2:
        problems.append(
            f"mrope_section {list(config.mrope_section)} adds up to {sum(config.mrope_section)}, "
            f"expected half the rotary size {config.rotary_dim // 2}"
        )
    if config.moe is not None and config.moe.num_experts_per_tok > config.moe.num_experts:
        problems.append(
            f"num_experts_per_tok {config.moe.num_experts_per_tok} "
            f"exceeds num_experts {config.moe.num_experts}"
        )
    if config.linear_conv_kernel_dim < 2:
        problems.append("linear_conv_kernel_dim is 1, expected at least 2")
    return problems
