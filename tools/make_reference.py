#!/usr/bin/env python3
"""Regenerates `tests/data/reference`: three very small checkpoints and what transformers computes on them.

It owns the data that lets the default suite judge the model without any other download. It needs torch and
transformers, which the suite itself does not:

    python tools/make_reference.py tests/data/reference

Each folder holds `config.json`, safetensors, and `reference.npz` with, for one prompt of S tokens:
`input_ids` [S], `logits` [S, V], `hidden` [L+1, S, H] (embeddings, then the residual stream after every
layer), `recurrent` [Llin, Hv, Dk, Dv] and `conv` [Llin, M, K-1] after the prompt, and `greedy` [G], the
continuation, whose smallest gap between the best two logits is `greedy_margin`.

The three differ where loaders go wrong: `dense` is float32 with flat names; `moe` is bfloat16, sharded, with
the released prefix, fused experts, old rope field names, and vision and draft tensors to be skipped; `tied`
is bfloat16 with one expert-free head shared with the embedding.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

PROMPT_TOKENS = 70  # crosses one chunk and one page border
GREEDY_TOKENS = 12
MIN_MARGIN = 5e-3  # far above any rounding, so that greedy tokens compare exactly
TEXT = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 50000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
DENSE = {"intermediate_size": 40}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Returns a parameter whose size makes its term of the model visible in the logits."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(0.05 + 8.0 * torch.rand(shape, generator=generator))
    if name.endswith("dt_bias"):
        return torch.log(torch.expm1(0.01 + 0.5 * torch.rand(shape, generator=generator)))
    if name.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith("norm.weight"):
        return 0.2 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return 0.5 * noise
    gain = 2.0 if "lm_head" in name or name.endswith("mlp.gate.weight") else 1.0
    if "out_proj" in name or "o_proj" in name or "down_proj" in name:
        gain = (
            0.5  # added to the residual stream: smaller, so that rounding does not grow from layer to layer
        )
    return gain * noise / math.sqrt(shape[-1])


def build(kind: str, seed: int) -> torch.nn.Module:
    """Returns a float32 model of one kind; bfloat16 kinds hold exactly representable values."""
    fields = {**TEXT, "rope_parameters": dict(ROPE), "tie_word_embeddings": kind == "tied"}
    if kind == "moe":
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**fields, **MOE))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields, **DENSE))
    model.config._attn_implementation = "eager"
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = draw(name, tuple(parameter.shape), generator)
            parameter.copy_(value.to(torch.bfloat16).float() if kind != "dense" and not wide(name) else value)
    model.tie_weights()
    return model


def wide(name: str) -> bool:
    """Returns whether the released bfloat16 files keep this tensor in float32."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


def reference(model: torch.nn.Module, prompt: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns the arrays of `reference.npz` for one prompt."""
    with torch.no_grad():
        plain = model(prompt[None], output_hidden_states=True, use_cache=True)
        after_layers = capture_layers(model, prompt)
        ids, margins = prompt.tolist(), []
        for _ in range(GREEDY_TOKENS):
            logits = model(torch.tensor(ids)[None]).logits[0, -1]
            best, second = torch.topk(logits, 2).values.tolist()
            margins.append(best - second)
            ids.append(int(logits.argmax()))
    linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    layers = [plain.past_key_values.layers[i] for i in linear]
    return {
        "input_ids": prompt.numpy().astype(np.int32),
        "logits": plain.logits[0].numpy(),
        "hidden": after_layers.numpy(),
        "recurrent": np.stack([state_of(layer.recurrent_states)[0].numpy() for layer in layers]),
        "conv": np.stack([state_of(layer.conv_states)[0, :, 1:].numpy() for layer in layers]),
        "greedy": np.array(ids[len(prompt) :], np.int32),
        "greedy_margin": np.float32(min(margins)),
    }


def state_of(value: object) -> torch.Tensor:
    """Returns the tensor of a cache entry, which some versions wrap in a one-entry mapping."""
    return next(iter(value.values())) if isinstance(value, dict) else value


def capture_layers(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """Returns [L+1, S, H]: embeddings and the output of every layer, before the final norm."""
    seen = [model.model.embed_tokens(prompt)]
    hooks = [
        layer.register_forward_hook(
            lambda _module, _args, out: seen.append((out[0] if isinstance(out, tuple) else out)[0])
        )
        for layer in model.model.layers
    ]
    model(prompt[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def checkpoint_files(kind: str, model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Returns file name -> tensors, spelled as checkpoints of this kind are."""
    dtype = torch.float32 if kind == "dense" else torch.bfloat16
    tensors = {
        name: value.detach().to(torch.float32 if wide(name) else dtype).contiguous().clone()
        for name, value in model.state_dict().items()
        if not (kind == "tied" and name == "lm_head.weight")
    }
    if kind != "moe":
        return {"model.safetensors": tensors}
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    tensors["model.visual.pos_embed.weight"] = torch.zeros(2, 2, dtype=dtype)
    tensors["mtp.fc.weight"] = torch.zeros(2, 4, dtype=dtype)
    names = sorted(tensors)
    half = len(names) // 2
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:half]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[half:]},
    }


def config_of(kind: str) -> dict[str, object]:
    """Returns the config.json of one kind."""
    if kind != "moe":
        text = {**TEXT, **DENSE, "rope_parameters": ROPE, "tie_word_embeddings": kind == "tied"}
        return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **text}
    old_rope = {
        name: value for name, value in ROPE.items() if name not in ("rope_theta", "partial_rotary_factor")
    }
    text = {
        "model_type": "qwen3_5_moe_text",
        **TEXT,
        **MOE,
        "rope_scaling": old_rope,
        "rope_theta": ROPE["rope_theta"],
        "partial_rotary_factor": ROPE["partial_rotary_factor"],
        "mamba_ssm_dtype": "float32",
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def write(kind: str, directory: Path, seed: int) -> float:
    """Writes one folder and returns the greedy margin it reached."""
    for attempt in range(seed, seed + 50):
        model = build(kind, attempt)
        generator = torch.Generator().manual_seed(attempt)
        prompt = torch.randint(0, TEXT["vocab_size"], (PROMPT_TOKENS,), generator=generator)
        arrays = reference(model, prompt)
        if arrays["greedy_margin"] >= MIN_MARGIN:
            break
    else:
        raise SystemExit(f"no seed gives {kind} a greedy margin of {MIN_MARGIN}")
    directory.mkdir(parents=True, exist_ok=True)
    files = checkpoint_files(kind, model)
    for file_name, tensors in files.items():
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file_name for file_name, tensors in files.items() for name in tensors}
        index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1, sort_keys=True)
        (directory / "model.safetensors.index.json").write_text(index + "\n")
    (directory / "config.json").write_text(json.dumps(config_of(kind), indent=1, sort_keys=True) + "\n")
    np.savez_compressed(directory / "reference.npz", **arrays)
    return float(arrays["greedy_margin"])


def main() -> None:
    """Writes all folders below the one named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for kind in ("dense", "moe", "tied"):
        margin = write(kind, args.out / kind, args.seed)
        print(f"{kind}: smallest greedy margin {margin:.4f}")


if __name__ == "__main__":
    main()
