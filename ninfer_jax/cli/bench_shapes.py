"""The geometries that ``bench model`` measures, and random checkpoints of them on disk.

Owns no measuring. The checkpoints are ordinary Hugging Face directories, so that both sides load the same
file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_THETA = 10_000_000.0


@dataclass(frozen=True)
class BenchShape:
    """One geometry: the fields of config.json that differ between shapes, and what to run on it."""

    name: str
    config: Mapping[str, Any]
    prompt_tokens: tuple[int, ...] = (512, 2048)
    batch_rows: tuple[int, ...] = (1, 4, 8)
    decode_steps: int = 32
    decode_prompt_tokens: int = 64  # of each row, so that decode attends over a page and a bit


# The oracle's dense model: 8 layers, grouped heads of odd widths, a vocabulary of 512.
DENSE_TINY = BenchShape(
    name="dense-tiny",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 24,
        "tie_word_embeddings": False,
        "rope_parameters": {"mrope_section": [3, 3, 2], "rope_theta": 100_000.0},
    },
)

# Large enough that matrix products count, small enough for a laptop: about 53 M parameters.
HIDDEN_512 = BenchShape(
    name="hidden-512",
    config={
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"mrope_section": [3, 3, 2], "rope_theta": ROPE_THETA},
    },
)

# The released 0.8B (facts 1.6): 752,393,024 parameters without vision and draft head.
REAL_0_8B = BenchShape(
    name="0.8b",
    config={
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"mrope_section": [11, 11, 10], "rope_theta": ROPE_THETA},
    },
    decode_steps=8,
)

SHAPES: Mapping[str, BenchShape] = {shape.name: shape for shape in (DENSE_TINY, HIDDEN_512, REAL_0_8B)}


def hf_config(shape: BenchShape) -> dict[str, Any]:
    """Returns the whole config.json of a shape, in the text-only layout that transformers loads."""
    config = dict(shape.config)
    rope = {"rope_type": "default", "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    num_layers = config["num_hidden_layers"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "layer_types": [
            "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(num_layers)
        ],
        "max_position_embeddings": 8192,
        "mamba_ssm_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **config,
        "rope_parameters": {**rope, **config["rope_parameters"]},
    }


def write_checkpoint(shape: BenchShape, directory: Path, *, with_weights: bool, seed: int = 0) -> Path:
    """Returns a directory that now holds a random checkpoint of the shape.

    Args:
        shape: the geometry.
        directory: made if absent.
        with_weights: False writes config.json alone, enough for ``load_format="dummy"``.
        seed: of the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(shape), indent=2), encoding="utf-8")
    if with_weights:
        from safetensors.numpy import save_file

        from ninfer_jax.model.config import load_config
        from ninfer_jax.model.loader import export_tensors, make_random_module

        module = make_random_module(load_config(directory), seed=seed)
        save_file(export_tensors(module), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
