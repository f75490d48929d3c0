"""Frozen dataclasses of plain values as JSON values and back, strictly.

Owns: one rule per kind of field (int, bool, str, tuple, Enum, array of integers, nested dataclass). Owns no
schema version and no meaning: `problem_json` and `outcome` say what a file holds. Arrays are written as
``{"dtype", "shape", "data"}`` with whole numbers, so that nothing is rounded and a person can read them.
"""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from functools import lru_cache
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
DTYPES: Final = ("bool", "int8", "int32", "int64", "uint32")
MAX_ITEMS: Final = 1 << 26


def encode(value: object) -> Any:
    """Returns the JSON value of a dataclass, tuple, enum member, array or number.

    Raises:
        TypeError: for anything else, such as a float: a file must give the same bits back.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise TypeError(f"arrays of {value.dtype} are not written, only {', '.join(DTYPES)}")
        data = value.astype(np.int8) if value.dtype == bool else value
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": data.ravel().tolist()}
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    raise TypeError(f"cannot write a {type(value).__name__}")


def decode(kind: type[T], source: object, where: str) -> T:
    """Returns the dataclass that `encode` wrote.

    Raises:
        ValueError: naming the member at which the value is not what `kind` says.
    """
    return _decode(kind, source, where)


@lru_cache(maxsize=128)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, source: Any, where: str) -> Any:
    kind = getattr(kind, "__supertype__", kind)  # NewType
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = get_args(kind)
        if source is None and type(None) in options:
            return None
        return _decode(next(o for o in options if o is not type(None)), source, where)
    if origin is tuple:
        return _tuple(get_args(kind), source, where)
    if kind is np.ndarray:
        return _array(source, where)
    if kind in (int, bool, str):
        if type(source) is not kind:
            raise ValueError(f"{where}: expected {kind.__name__}, got {_show(source)}")
        return source
    if isinstance(kind, type) and issubclass(kind, Enum):
        if not isinstance(source, str) or source not in kind.__members__:
            raise ValueError(f"{where}: expected one of {', '.join(kind.__members__)}, got {_show(source)}")
        return kind[source]
    assert isinstance(kind, type) and dataclasses.is_dataclass(kind), f"{where}: no rule for {kind}"
    if not isinstance(source, dict):
        raise ValueError(f"{where}: expected an object, got {_show(source)}")
    names = [f.name for f in dataclasses.fields(kind)]
    missing, extra = set(names) - set(source), set(source) - set(names)
    if missing or extra:
        problems = [f"missing {n}" for n in sorted(missing)] + [f"unknown {_show(n)}" for n in sorted(extra)]
        raise ValueError(f"{where}: {', '.join(problems)}")
    return kind(**{n: _decode(_hints(kind)[n], source[n], f"{where}.{n}") for n in names})


def _tuple(args: tuple[Any, ...], source: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(source, list):
        raise ValueError(f"{where}: expected a list, got {_show(source)}")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(source)
    if len(args) != len(source):
        raise ValueError(f"{where}: expected {len(args)} entries, got {len(source)}")
    return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, source, strict=True)))


def _array(source: Any, where: str) -> np.ndarray:
    if not isinstance(source, dict) or set(source) != {"dtype", "shape", "data"}:
        raise ValueError(f"{where}: expected an array with dtype, shape and data, got {_show(source)}")
    dtype, shape, data = source["dtype"], source["shape"], source["data"]
    if dtype not in DTYPES:
        raise ValueError(f"{where}.dtype: expected one of {', '.join(DTYPES)}, got {_show(dtype)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= MAX_ITEMS for n in shape):
        raise ValueError(f"{where}.shape: expected sizes, got {_show(shape)}")
    if not isinstance(data, list) or not all(type(x) is int for x in data):
        raise ValueError(f"{where}.data: expected whole numbers")
    size = 1
    for n in shape:
        size *= n
    if size != len(data):
        raise ValueError(f"{where}: {len(data)} numbers do not fill shape {shape}")
    limits = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if data and not (limits[0] <= min(data) and max(data) <= limits[1]):
        raise ValueError(f"{where}.data: a number is outside of {dtype}")
    return np.asarray(data, np.int64).astype(dtype).reshape(shape)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
