"""Owns the safetensors files of a checkpoint: which there are, what their headers say, reading one tensor.

It owns no names or layouts (`weights.py`) and makes no parameters (`loader.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ninfer_jax.model.errors import CheckpointError
from ninfer_jax.model.weights import name_some, skipped_names

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_TENSOR_DTYPES = ("F32", "BF16", "F16")

# Bits that are all set in an infinity and in every NaN, and in no finite number.
_EXPONENT_BITS = {
    "float32": np.uint32(0x7F80_0000),
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
}
# Elements looked at together: few enough that what the check makes of them stays in a core's cache.
_CHECKED_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class TensorFiles:
    """The headers of a checkpoint: where each tensor is and what it looks like; no weight has been read."""

    file_of: Mapping[
        str, Any
    ]  # open, memory-mapped: parsing a header anew for every expert would be quadratic
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, possibly as a view of the mapped file.

        Raises:
            CheckpointError: if it holds NaN or infinity: one such weight makes every answer rubbish.
        """
        tensor = self.file_of[name].get_tensor(name)
        check_finite(name, tensor)
        return tensor


def has_weight_files(directory: Path) -> bool:
    """Returns whether `open_checkpoint` would find anything to open."""
    return any(directory.glob("*.safetensors")) or (directory / INDEX_NAME).is_file()


def open_checkpoint(directory: Path) -> TensorFiles:
    """Returns the tensor directory of a sharded or single-file safetensors checkpoint.

    Where there is an index it says which shard a tensor is read from, and every shard must hold what the
    index says. Tensors that no index mentions are taken from wherever they are.

    Raises:
        CheckpointError: if there is no safetensors file, a shard is missing, unreadable or without a tensor
            that the index puts there, or a tensor has a dtype that is not a plain float.
    """
    index = directory / INDEX_NAME
    shard_of = _read_index(index) if index.is_file() else {}
    if shard_of:
        files = [directory / name for name in sorted(set(shard_of.values()))]
    elif (directory / SINGLE_NAME).is_file() and not index.is_file():
        files = [directory / SINGLE_NAME]
    else:
        files = [] if index.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"no safetensors weights in {directory}: expected {SINGLE_NAME} or an index.json of shards"
        )
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise CheckpointError(f"{len(absent)} shards named by {index.name} are missing: {name_some(absent)}")
    file_of: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            file = safe_open(path, framework="numpy")
        except Exception as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        for name in file.keys():  # safe_open is no mapping
            if shard_of.get(name, path.name) != path.name:
                continue  # the index names another shard for it
            header = file.get_slice(name)
            if header.get_dtype() not in _TENSOR_DTYPES and not skipped_names((name,)):
                raise CheckpointError(
                    f"{name} is {header.get_dtype()}, expected one of {', '.join(_TENSOR_DTYPES)}"
                )
            file_of[name], shapes[name] = file, tuple(header.get_shape())
    _check_index(index, shard_of, shapes)
    return TensorFiles(file_of, shapes)


def check_finite(name: str, tensor: np.ndarray) -> None:
    """Raises CheckpointError, naming the tensor, if it holds NaN or infinity.

    Looks at bits, a slice at a time: no copy of the tensor is made, and reading it from the disk costs more.

    Args:
        name: for the message.
        tensor: float32, bfloat16 or float16, of any shape, contiguous as files hold it.
    """
    exponent = _EXPONENT_BITS[tensor.dtype.name]
    bits = tensor.reshape(-1).view(exponent.dtype)
    for start in range(0, bits.size, _CHECKED_ELEMENTS):
        looked_at = bits[start : start + _CHECKED_ELEMENTS] & exponent
        if np.max(looked_at) == exponent:
            first = start + int(np.argmax(looked_at))
            place = [int(axis) for axis in np.unravel_index(first, tensor.shape)]
            raise CheckpointError(
                f"{name} is {tensor.reshape(-1)[first]} at {place}, expected finite weights: the file is "
                "damaged or the training run diverged; fetch or export it again"
            )


def _read_index(index: Path) -> dict[str, str]:
    """Returns tensor name -> file name, all of them beside the index: a checkpoint may not reach outside."""
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not valid JSON: {error}") from error
    weight_map = raw.get("weight_map", {}) if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} must hold an object whose weight_map maps tensor names to file names")
    outside = [name for name in sorted(set(weight_map.values())) if not name or Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, expected the name of a file in the same directory"
        )
    return weight_map


def _check_index(index: Path, shard_of: Mapping[str, str], held: Mapping[str, object]) -> None:
    """Raises CheckpointError naming the tensors that the index puts into shards that do not hold them.

    Vision and draft-head tensors may be gone: nobody reads them, and stripping them leaves an old index.
    """
    skipped = set(skipped_names(shard_of))
    lost = [f"{name} in {shard_of[name]}" for name in shard_of if name not in held and name not in skipped]
    if lost:
        raise CheckpointError(
            f"{index.name} promises {len(lost)} tensors that its shards do not hold: {name_some(lost)}; "
            "the shards and the index belong to different versions, fetch both again"
        )
