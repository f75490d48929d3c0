"""Owns the correspondence between checkpoint tensors and the module's parameters, in both directions.

It owns names, shapes and layouts only: no file is opened here (`tensor_files.py`) and no array reaches a
device.

Letters: V vocabulary, H hidden size, F/Fs expert and shared widths, E experts, D head size, M convolution
channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_jax.model.config import FULL_ATTENTION, Qwen35Config
from ninfer_jax.model.errors import CheckpointError

Shape = tuple[int, ...]
Relayout = Callable[[np.ndarray], np.ndarray]

# Tensors of parts of the released checkpoints that this package does not run.
SKIPPED_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "mtp.", "model.mtp.")
HEAD_NAME = "lm_head.weight"
RELEASED_PREFIX = "model.language_model."
TEXT_ONLY_PREFIX = "model."


@dataclass(frozen=True)
class CheckpointStyle:
    """How one checkpoint spells its names."""

    prefix: str  # before embed_tokens, layers and norm
    fused_experts: bool  # one tensor for all experts of a layer, or three per expert


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor and the place it fills in a parameter."""

    name: str
    shape: Shape
    place: tuple[slice | int, ...]  # where in the parameter; () is all of it
    pack: Relayout  # tensor -> parameter[place]
    unpack: Relayout  # parameter[place] -> tensor


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made of checkpoint tensors."""

    path: str  # dotted path in the module
    shape: Shape
    parts: tuple[Part, ...]


def detect_style(names: Collection[str]) -> CheckpointStyle:
    """Returns the naming style of a checkpoint.

    Args:
        names: every tensor name in it.
    Raises:
        CheckpointError: if no Qwen3.5 text model is recognised.
    """
    for prefix in (RELEASED_PREFIX, TEXT_ONLY_PREFIX):
        text = [name for name in names if name.startswith((f"{prefix}layers.", f"{prefix}embed_tokens."))]
        if text:
            fused = not any(".mlp.experts.0." in name for name in text)
            return CheckpointStyle(prefix, fused)
    if any(name.startswith("language_model.model.") for name in names):
        raise CheckpointError(
            "this is an MLX conversion (language_model.model.*), whose norms and layouts differ; "
            "use the original Hugging Face checkpoint"
        )
    shown = ", ".join(sorted(names)[:4]) or "none"
    raise CheckpointError(
        f"no Qwen3.5 text weights: expected names under {RELEASED_PREFIX}layers.* "
        f"or {TEXT_ONLY_PREFIX}layers.*, "
        f"got {len(names)} tensors ({shown}, ...)"
    )


def recipes(config: Qwen35Config, style: CheckpointStyle) -> tuple[Recipe, ...]:
    """Returns the recipe of every parameter of `Qwen35(config)`, in layer order."""
    return tuple(_model_recipes(config, style))


def skipped_names(names: Collection[str]) -> tuple[str, ...]:
    """Returns, sorted, the vision and draft-head tensors among `names`, which the text model does not use."""
    return tuple(sorted(name for name in names if name.startswith(SKIPPED_PREFIXES)))


def check_tensors(table: Collection[Recipe], shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError naming every missing tensor and every tensor of the wrong shape.

    Args:
        table: what the geometry needs.
        shapes: shape of every tensor in the checkpoint, known from headers alone.
    """
    parts = [part for recipe in table for part in recipe.parts]
    missing = [part.name for part in parts if part.name not in shapes]
    wrong = [
        f"{part.name} is {list(shapes[part.name])}, expected {list(part.shape)}"
        for part in parts
        if part.name in shapes and tuple(shapes[part.name]) != part.shape
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {name_some(missing)}")
    if wrong:
        problems.append(f"{len(wrong)} tensors contradict config.json: {name_some(wrong)}")
    if problems:
        raise CheckpointError("the checkpoint cannot be loaded: " + "; ".join(problems))


def build_parameter(recipe: Recipe, read: Callable[[str], np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Returns one parameter, reading its tensors one at a time; it may alias what `read` returned.

    Args:
        recipe: the parameter.
        read: returns the tensor of a name.
        dtype: of the result.
    """
    if len(recipe.parts) == 1 and not recipe.parts[0].place:
        return recipe.parts[0].pack(read(recipe.parts[0].name)).astype(dtype, copy=False)
    out = np.empty(recipe.shape, dtype)
    for part in recipe.parts:
        out[part.place] = part.pack(read(part.name))
    return out


def checkpoint_tensors(
    config: Qwen35Config, parameters: Mapping[str, np.ndarray], style: CheckpointStyle
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, tensor) for every checkpoint tensor: the inverse of loading, for trainers and tests.

    Args:
        config: geometry of the module.
        parameters: dotted module path -> value, see `loader.parameters_of`.
        style: names to write.
    """
    for recipe in recipes(config, style):
        value = np.asarray(parameters[recipe.path])
        for part in recipe.parts:
            yield part.name, np.ascontiguousarray(part.unpack(value[part.place]))


def name_some(items: Sequence[str], limit: int = 8) -> str:
    """Returns the first few names as text, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _transpose(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _whole(path: str, name: str, shape: Shape) -> Recipe:
    return Recipe(path, shape, (Part(name, shape, (), _same, _same),))


def _linear(path: str, name: str, fan_out: int, fan_in: int) -> Recipe:
    return Recipe(path, (fan_in, fan_out), (Part(name, (fan_out, fan_in), (), _transpose, _transpose),))


def _columns(path: str, fan_in: int, pieces: list[tuple[str, int, Relayout, Relayout]]) -> Recipe:
    """One fused projection: pieces are (name, rows, row order to ours, row order back)."""
    parts, start = [], 0
    for name, rows, order, restore in pieces:
        parts.append(
            Part(
                name,
                (rows, fan_in),
                (slice(None), slice(start, start + rows)),
                lambda x, order=order: _transpose(order(x)),
                lambda x, restore=restore: restore(_transpose(x)),
            )
        )
        start += rows
    return Recipe(path, (fan_in, start), tuple(parts))


def _model_recipes(config: Qwen35Config, style: CheckpointStyle) -> Iterator[Recipe]:
    p, hidden, vocab = style.prefix, config.hidden_size, config.vocab_size
    yield _whole("embedding", f"{p}embed_tokens.weight", (vocab, hidden))
    for index, kind in enumerate(config.layer_types):
        ours, theirs = f"layers.{index}", f"{p}layers.{index}"
        yield _whole(f"{ours}.mixer_norm.offset", f"{theirs}.input_layernorm.weight", (hidden,))
        mixer = _attention_recipes if kind == FULL_ATTENTION else _delta_recipes
        yield from mixer(config, f"{ours}.mixer", theirs)
        yield _whole(f"{ours}.ffn_norm.offset", f"{theirs}.post_attention_layernorm.weight", (hidden,))
        if config.moe is None:
            assert config.intermediate_size is not None
            yield from _swiglu_recipes(f"{ours}.ffn", f"{theirs}.mlp", hidden, config.intermediate_size)
        else:
            yield from _moe_recipes(config, f"{ours}.ffn", f"{theirs}.mlp", style.fused_experts)
    yield _whole("norm.offset", f"{p}norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield _whole("head", HEAD_NAME, (vocab, hidden))


def _attention_recipes(config: Qwen35Config, ours: str, theirs: str) -> Iterator[Recipe]:
    heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    keys = config.num_key_value_heads * dim
    theirs = f"{theirs}.self_attn"

    def regroup(x: np.ndarray, outer: int, inner: int) -> np.ndarray:
        return x.reshape(outer, inner, dim, hidden).swapaxes(0, 1).reshape(2 * heads * dim, hidden)

    yield _columns(
        f"{ours}.qkv",
        hidden,
        [
            # rows alternate query and gate head by head; ours are all queries, then all gates
            (
                f"{theirs}.q_proj.weight",
                2 * heads * dim,
                lambda x: regroup(x, heads, 2),
                lambda x: regroup(x, 2, heads),
            ),
            (f"{theirs}.k_proj.weight", keys, _same, _same),
            (f"{theirs}.v_proj.weight", keys, _same, _same),
        ],
    )
    yield _whole(f"{ours}.q_norm.offset", f"{theirs}.q_norm.weight", (dim,))
    yield _whole(f"{ours}.k_norm.offset", f"{theirs}.k_norm.weight", (dim,))
    yield _linear(f"{ours}.out_proj", f"{theirs}.o_proj.weight", hidden, heads * dim)


def _delta_recipes(config: Qwen35Config, ours: str, theirs: str) -> Iterator[Recipe]:
    heads, channels, width = (
        config.linear_num_value_heads,
        config.conv_channels,
        config.linear_conv_kernel_dim,
    )
    theirs = f"{theirs}.linear_attn"
    yield _columns(
        f"{ours}.in_proj",
        config.hidden_size,
        [
            (f"{theirs}.in_proj_{name}.weight", rows, _same, _same)
            for name, rows in (
                ("qkv", channels),
                ("z", config.linear_value_width),
                ("b", heads),
                ("a", heads),
            )
        ],
    )
    taps = Part(
        f"{theirs}.conv1d.weight", (channels, 1, width), (), lambda x: x[:, 0].T, lambda x: x.T[:, None]
    )
    yield Recipe(f"{ours}.conv", (width, channels), (taps,))
    yield _whole(f"{ours}.a_log", f"{theirs}.A_log", (heads,))
    yield _whole(f"{ours}.dt_bias", f"{theirs}.dt_bias", (heads,))
    yield _whole(f"{ours}.norm", f"{theirs}.norm.weight", (config.linear_value_head_dim,))
    yield _linear(
        f"{ours}.out_proj", f"{theirs}.out_proj.weight", config.hidden_size, config.linear_value_width
    )


def _swiglu_recipes(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Recipe]:
    yield _columns(
        f"{ours}.gate_up",
        hidden,
        [(f"{theirs}.{name}_proj.weight", width, _same, _same) for name in ("gate", "up")],
    )
    yield _linear(f"{ours}.down", f"{theirs}.down_proj.weight", hidden, width)


def _moe_recipes(config: Qwen35Config, ours: str, theirs: str, fused: bool) -> Iterator[Recipe]:
    assert config.moe is not None
    hidden, experts, width = config.hidden_size, config.moe.num_experts, config.moe.moe_intermediate_size
    yield _linear(f"{ours}.router", f"{theirs}.gate.weight", experts, hidden)
    gate_up, down = (experts, hidden, 2 * width), (experts, width, hidden)
    if fused:
        both = Part(
            f"{theirs}.experts.gate_up_proj", (experts, 2 * width, hidden), (), _transpose, _transpose
        )
        yield Recipe(f"{ours}.gate_up", gate_up, (both,))
        one = Part(f"{theirs}.experts.down_proj", (experts, hidden, width), (), _transpose, _transpose)
        yield Recipe(f"{ours}.down", down, (one,))
    else:
        yield Recipe(
            f"{ours}.gate_up",
            gate_up,
            tuple(
                Part(
                    f"{theirs}.experts.{e}.{name}_proj.weight",
                    (width, hidden),
                    (e, slice(None), slice(start, start + width)),
                    _transpose,
                    _transpose,
                )
                for e in range(experts)
                for name, start in (("gate", 0), ("up", width))
            ),
        )
        yield Recipe(
            f"{ours}.down",
            down,
            tuple(
                Part(f"{theirs}.experts.{e}.down_proj.weight", (hidden, width), (e,), _transpose, _transpose)
                for e in range(experts)
            ),
        )
    shared = config.moe.shared_expert_intermediate_size
    yield from _swiglu_recipes(f"{ours}.shared", f"{theirs}.shared_expert", hidden, shared)
    yield _linear(f"{ours}.shared_gate", f"{theirs}.shared_expert_gate.weight", 1, hidden)
