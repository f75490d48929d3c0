"""Owns loading: a Hugging Face directory, or nothing but a geometry, to parameters on the device.

It owns no names or layouts (`weights.py`), opens no file (`tensor_files.py`) and runs the model only for
research (`LoadedModel.logits`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax.model.cache import PAGE_TOKENS
from ninfer_jax.model.config import Qwen35Config, load_config
from ninfer_jax.model.tensor_files import has_weight_files, open_checkpoint
from ninfer_jax.model.transformer import Qwen35, full_logits
from ninfer_jax.model.weights import (
    HEAD_NAME,
    CheckpointStyle,
    build_parameter,
    check_tensors,
    checkpoint_tensors,
    detect_style,
    recipes,
    skipped_names,
)

DTypeName = Literal["float32", "bfloat16"]
_DTYPES = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}
DEFAULT_STYLE = CheckpointStyle(prefix="model.", fused_experts=True)


def abstract_parameters(config: Qwen35Config, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns dotted path -> shape and dtype of every parameter, without allocating one."""
    _, state = nnx.split(nnx.eval_shape(lambda: Qwen35(config, dtype)))
    return {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(value.shape, value.dtype)
        for path, value in nnx.to_flat_state(state)
    }


def module_from_parameters(
    config: Qwen35Config, dtype: jnp.dtype, value_of: Callable[[str, jax.ShapeDtypeStruct], jax.Array]
) -> Qwen35:
    """Returns a module whose parameters are `value_of(path, shape and dtype)`, asked one at a time."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Qwen35(config, dtype)))
    flat = []
    for path, variable in nnx.to_flat_state(abstract):
        spec = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        flat.append((path, variable.replace(value_of(".".join(map(str, path)), spec))))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def parameters_of(module: Qwen35) -> dict[str, jax.Array]:
    """Returns dotted path -> value of every parameter of a module."""
    _, state = nnx.split(module)
    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(state)}


def random_value(
    path: str, spec: jax.ShapeDtypeStruct, config: Qwen35Config, rng: np.random.Generator
) -> np.ndarray:
    """Returns a random initial parameter that keeps activations and logits near unit size, float32.

    Args:
        path: dotted path in the module; its last names say what the parameter does.
        spec: its shape.
        config: the geometry.
        rng: consumed.
    """
    name = path.rpartition(".")[2]
    shape = spec.shape
    if name == "offset":
        return np.zeros(shape, np.float32)
    if name == "norm":
        return np.ones(shape, np.float32)
    if name == "a_log":
        return np.log(rng.uniform(1.0, 16.0, shape)).astype(np.float32)
    if name == "dt_bias":
        step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
        return np.log(np.expm1(step)).astype(np.float32)  # the inverse of softplus
    fan_in = config.hidden_size if path in ("embedding", "head") else shape[-2]
    # What is added to the residual stream starts smaller, so that depth does not inflate it.
    gain = 0.5 if name in ("out_proj", "down") else 1.0
    value = rng.random(
        shape, np.float32
    )  # uniform: four times as fast as normal, and the variance is what matters
    value -= np.float32(0.5)
    value *= np.float32(gain * math.sqrt(12.0 / fan_in))
    return value


def make_random_module(config: Qwen35Config, *, dtype: DTypeName = "float32", seed: int = 0) -> Qwen35:
    """Returns a module with random parameters, to train or to measure; one tensor at a time.

    Args:
        config: the geometry.
        dtype: of weights and activations.
        seed: the same seed gives the same parameters.
    """
    rng = np.random.default_rng(seed)
    return module_from_parameters(
        config,
        _DTYPES[dtype],
        lambda path, spec: jnp.array(random_value(path, spec, config, rng), spec.dtype),
    )


def export_tensors(module: Qwen35, style: CheckpointStyle = DEFAULT_STYLE) -> dict[str, np.ndarray]:
    """Returns the module's parameters as Hugging Face tensors, ready for `safetensors.numpy.save_file`.

    Args:
        module: the model.
        style: names to write; the text-only style by default.
    """
    values = {path: np.asarray(value) for path, value in parameters_of(module).items()}
    return dict(checkpoint_tensors(module.config, values, style))


def param_bytes(config: Qwen35Config, dtype: DTypeName) -> int:
    """Returns the bytes that the parameters of `config` occupy on the device, without allocating them."""
    specs = abstract_parameters(config, _DTYPES[dtype]).values()
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on the device: structure, and flat leaves that any jitted function can take as an argument."""

    config: Qwen35Config
    graphdef: nnx.GraphDef
    leaves: tuple[jax.Array, ...]
    treedef: jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]
    dtype: jnp.dtype
    skipped_tensors: tuple[str, ...]  # known parts that a text model does not use: vision, draft head
    extra_tensors: tuple[str, ...]  # names that mean nothing to this package

    def module(self, leaves: Sequence[jax.Array] | None = None) -> Qwen35:
        """Returns the module over these leaves; inside jit pass the traced ones, outside none."""
        leaves = self.leaves if leaves is None else leaves
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns f32[T, V], the next-token logits at every position of one text, with no engine.

        Args:
            token_ids: int[T], T >= 1, each below the vocabulary size.
        Raises:
            ValueError: if there is no token or one is out of range.
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"token_ids is {ids.dtype}{list(ids.shape)}, expected one text: int[T] with T >= 1"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"token ids span {ids.min()}..{ids.max()}, expected 0..{self.config.vocab_size - 1}"
            )
        # Few lengths, few compilations: up to the next power of two of pages.
        padded = PAGE_TOKENS * 2 ** math.ceil(math.log2(-(-ids.size // PAGE_TOKENS)))
        tokens = np.zeros(padded, np.int32)
        tokens[: ids.size] = ids
        return np.array(_full_logits(self.graphdef, self.treedef, self.leaves, tokens)[: ids.size])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _full_logits(
    graphdef: nnx.GraphDef,
    treedef: jax.tree_util.PyTreeDef,  # pyright: ignore[reportInvalidTypeForm]
    leaves: tuple[jax.Array, ...],
    tokens: jax.Array,
) -> jax.Array:
    return full_logits(nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), tokens)


def load_settled_config(
    directory: str | Path, *, load_format: Literal["auto", "dummy"] = "auto"
) -> Qwen35Config:
    """Returns the geometry that `load_model` will have, from config and file headers; reads no weight.

    The two differ where a config says that the head is the embedding and the files hold a head of their own.
    A directory without weight files has the geometry of its config: what it would take can be asked before
    anything is downloaded.

    Args:
        directory: has `config.json`.
        load_format: as in `load_model`; dummy weights take the config at its word.
    Raises:
        CheckpointError: if the config is unsupported or there are weight files that cannot be used.
    """
    directory = Path(directory)
    config = load_config(directory)
    if load_format == "dummy" or not config.tie_word_embeddings or not has_weight_files(directory):
        return config
    return _settle(config, open_checkpoint(directory).shapes)


def _settle(config: Qwen35Config, shapes: Mapping[str, tuple[int, ...]]) -> Qwen35Config:
    if config.tie_word_embeddings and HEAD_NAME in shapes:
        return dataclasses.replace(config, tie_word_embeddings=False)
    return config


def load_model(
    directory: str | Path,
    *,
    dtype: DTypeName | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
) -> LoadedModel:
    """Returns the model of a Hugging Face directory, its weights on the default device.

    Everything that can be wrong is checked from config and file headers before a weight is read. Then
    parameters are made one at a time, so host and device memory stay below the weights plus one parameter.

    Args:
        directory: has `config.json` and, unless dummy, `model.safetensors` or shards with an index.
        dtype: of weights and activations; by default float32 on CPU and bfloat16 elsewhere.
        load_format: "auto" reads the checkpoint, "dummy" draws random weights of its geometry.
        seed: of the dummy weights.
    Raises:
        CheckpointError: if the checkpoint is unsupported, incomplete or contradicts its config.
        ValueError: if an argument is not one of its choices.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'bfloat16'")
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format is {load_format!r}, expected 'auto' or 'dummy'")
    directory = Path(directory)
    if load_format == "dummy":
        config = load_config(directory)
        return make_loaded_model(make_random_module(config, dtype=dtype, seed=seed))

    files = open_checkpoint(directory)
    config = _settle(load_config(directory), files.shapes)
    table = {recipe.path: recipe for recipe in recipes(config, detect_style(files.shapes))}
    check_tensors(table.values(), files.shapes)

    def value_of(path: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
        # jnp.array copies: an alias of the mapped file would change or fault when the file does.
        return jnp.array(build_parameter(table[path], files.read, spec.dtype))

    module = module_from_parameters(config, _DTYPES[dtype], value_of)
    skipped = skipped_names(files.shapes)
    used = {part.name for recipe in table.values() for part in recipe.parts}
    extra = tuple(sorted(set(files.shapes) - used - set(skipped)))
    return make_loaded_model(module, skipped, extra)


def make_loaded_model(
    module: Qwen35, skipped_tensors: tuple[str, ...] = (), extra_tensors: tuple[str, ...] = ()
) -> LoadedModel:
    """Returns a module split once into the flat leaves that serving passes to jit.

    Args:
        module: real arrays, not tracers.
        skipped_tensors: see `LoadedModel`.
        extra_tensors: see `LoadedModel`.
    """
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    return LoadedModel(
        config=module.config,
        graphdef=graphdef,
        leaves=tuple(leaves),
        treedef=treedef,
        dtype=jnp.dtype(module.dtype),
        skipped_tensors=skipped_tensors,
        extra_tensors=extra_tensors,
    )
