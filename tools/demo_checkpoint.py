"""The shape of the embedded model and its Hugging Face files: config, first weights, safetensors.

Owns names, shapes and dtypes on disk. The arithmetic is the product's own (`ninfer_jax.model`).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

# As in released checkpoints: these two stay in float32 beside bfloat16 weights.
FLOAT32_SUFFIXES = ("linear_attn.A_log", "linear_attn.norm.weight")


def demo_config(vocab_size: int, end_of_text_id: int) -> dict:
    """Returns config.json of the embedded model: 8 layers, hidden 192, both kinds of heads grouped, tied."""
    layer_types = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(8)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            # Contexts here are thousands of tokens, not hundreds of thousands.
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end_of_text_id,
        "pad_token_id": end_of_text_id,
        "use_cache": True,
    }


def generation_config(turn_end_id: int, end_of_text_id: int) -> dict:
    """Returns generation_config.json: both end tokens, and sampling that keeps a small model on its text."""
    return {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "eos_token_id": [turn_end_id, end_of_text_id],
        "bos_token_id": end_of_text_id,
        "pad_token_id": end_of_text_id,
    }


def tensor_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a tied dense text checkpoint, by its Hugging Face name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = config["linear_num_value_heads"]
    full = {
        "self_attn.q_proj.weight": (2 * query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (config["head_dim"],),
        "self_attn.k_norm.weight": (config["head_dim"],),
    }
    linear = {
        "linear_attn.in_proj_qkv.weight": (2 * key + value, hidden),
        "linear_attn.in_proj_z.weight": (value, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (2 * key + value, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, value),
    }
    common = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer, kind in enumerate(config["layer_types"]):
        mixer = full if kind == "full_attention" else linear
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (mixer | common).items()}
    return shapes


def first_tensors(config: Mapping, seed: int) -> dict[str, np.ndarray]:
    """Returns float32 weights to start from, by Hugging Face name.

    Matrices that write into the residual stream start smaller, so that the stream does not grow with depth.
    The linear
    heads start with half-lives from about one token to several hundred, so that some remember from the first
    step.
    """
    rng = np.random.default_rng(seed)
    heads = config["linear_num_value_heads"]
    rates = np.geomspace(1.0, 16.0, heads)
    steps = np.geomspace(0.1, 0.002, heads)
    depth_scale = (2 * config["num_hidden_layers"]) ** -0.5
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("A_log"):
            value = np.log(rates)
        elif name.endswith("dt_bias"):
            value = np.log(np.expm1(steps))  # softplus(dt_bias) == steps
        elif name.endswith("linear_attn.norm.weight"):
            value = np.ones(shape)
        elif name.endswith("norm.weight"):
            value = np.zeros(shape)  # offset norms: the gain is 1 + weight
        elif name.endswith("conv1d.weight"):
            value = rng.normal(0.0, 0.3, shape)
            value[:, 0, -1] += 0.6  # mostly the current token at first
        elif name.endswith("embed_tokens.weight"):
            value = rng.normal(0.0, 0.04, shape)
        else:
            value = rng.normal(0.0, shape[-1] ** -0.5, shape)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                value *= depth_scale
        tensors[name] = value.astype(np.float32)
    return tensors


def write_checkpoint(
    directory: Path, config: Mapping, tensors: Mapping[str, np.ndarray], turn_end_id: int
) -> dict[str, np.ndarray]:
    """Writes config.json, generation_config.json and model.safetensors; returns the tensors as they are on
    disk.

    All are rounded to bfloat16 but the two of each linear layer that released checkpoints keep in float32.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end_of_text_id = config["eos_token_id"]
    stored = {
        name: np.ascontiguousarray(
            value.astype(np.float32 if name.endswith(FLOAT32_SUFFIXES) else ml_dtypes.bfloat16)
        )
        for name, value in tensors.items()
    }
    weights = directory / "model.safetensors"
    save_file(stored, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # it is written as a private temporary file
    generation = generation_config(turn_end_id, end_of_text_id)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    return stored
