"""Named arrays with a description, saved so that a kill leaves the old or the new, and damage is refused.

Owns the folder of one saved session and every check of its bytes. It does not know what the arrays mean:
`session_store` does. Arrays go through orbax; orbax notices truncation but no flipped bit, and its overwrite
deletes before it writes, so names, checksums and the switch from old to new are our own. One process saves
into a folder at a time.

    SESSION/                    one saved session
        CURRENT                 which version counts, and the digest of its description; replaced atomically
        v000007/                that version: an orbax checkpoint, the description in its custom metadata

A version that CURRENT does not name is a leftover of a killed save, and goes at the next save.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np

from ninfer_jax.errors import SessionError, SessionErrorKind

FORMAT: Final = "ninfer-jax-session"
FORMAT_VERSION: Final = 1
_CURRENT: Final = "CURRENT"
_VERSION_NAME: Final = re.compile(r"v(\d{6})")
_OURS: Final = re.compile(
    r"v\d{6}(\.orbax-checkpoint-tmp.*)?|\.CURRENT\.\d+"
)  # all that a save may leave behind
_MAX_POINTER_BYTES: Final = 4096
_MAX_ARRAYS: Final = 256
_DTYPES: Final = ("bool", "int8", "int32", "int64", "float32", "bfloat16")


@dataclass(frozen=True, eq=False)
class SavedSession:
    """A saved session whose description has been verified; its arrays are still on disk."""

    folder: Path  # of the version
    description: Mapping[str, Any]  # what the saver said of it
    arrays: Mapping[str, Mapping[str, Any]]  # shape, dtype and checksum of each, by name

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays in memory."""
        return sum(_num_bytes(fact) for fact in self.arrays.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array.

        Raises:
            SessionError: if there is none of that name.
        """
        if name not in self.arrays:
            raise SessionError(SessionErrorKind.DAMAGED, f"{self.folder}: there is no array {name!r}")
        return tuple(self.arrays[name]["shape"])


def save_session_files(
    folder: Path, arrays: Mapping[str, np.ndarray], description: Mapping[str, Any]
) -> Path:
    """Returns the folder of a new version that counts from now on; what counted before goes afterwards.

    Args:
        folder: of this one session; made if absent.
        arrays: by name; few and large, since each costs about a millisecond.
        description: JSON values.
    Raises:
        SessionError: UNSUITABLE_PATH if the folder is something else already.
    """
    from orbax.checkpoint import v1 as ocp

    check_session_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    clean_leftovers(folder)
    numbers = [int(match[1]) for match in map(_VERSION_NAME.fullmatch, os.listdir(folder)) if match]
    name = f"v{max(numbers, default=0) + 1:06d}"
    facts = {key: _facts(array) for key, array in arrays.items()}
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "arrays": facts, "session": dict(description)}
    filled = {key: array for key, array in arrays.items() if array.size}  # orbax takes no empty ones
    ocp.save(folder / name, filled, custom_metadata=head)
    _sync_tree(folder / name)
    pointer = json.dumps({"version": name, "digest": _digest(head)})
    staged = folder / f".{_CURRENT}.{os.getpid()}"
    with open(staged, "w", encoding="utf-8") as file:
        file.write(pointer)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, folder / _CURRENT)
    _sync_folder(folder)
    clean_leftovers(folder)
    return folder / name


def check_session_folder(folder: Path) -> None:
    """Returns nothing if a session can be saved there: a new folder, an empty one, or an earlier save's.

    Raises:
        SessionError: UNSUITABLE_PATH.
    """
    if folder.exists() and not _is_session_folder(folder):
        raise SessionError(
            SessionErrorKind.UNSUITABLE_PATH,
            f"{folder} exists and is no saved session; give a new or empty folder",
        )
    _refuse_links(folder)


def open_session_files(folder: Path) -> SavedSession:
    """Returns a saved session after verifying its description; no array is read.

    Raises:
        SessionError: saying what is wrong; nothing on disk is touched.
    """
    from orbax.checkpoint import v1 as ocp

    pointer = _read_pointer(folder)
    version = folder / pointer["version"]
    _refuse_links(version)
    if not version.is_dir():
        raise SessionError(SessionErrorKind.DAMAGED, f"{folder}: version {version.name} is missing")
    head = _read(version, lambda: ocp.metadata(version).custom_metadata)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise SessionError(SessionErrorKind.DAMAGED, f"{version} is no {FORMAT}")
    if head.get("format_version") != FORMAT_VERSION:
        raise SessionError(
            SessionErrorKind.NEWER_FORMAT,
            f"{version}: format version {head.get('format_version')!r}, this program reads {FORMAT_VERSION}",
        )
    if _digest(head) != pointer["digest"]:
        raise SessionError(SessionErrorKind.DAMAGED, f"{version}: its description is not the one saved")
    arrays = head["arrays"]
    if len(arrays) > _MAX_ARRAYS:
        raise SessionError(SessionErrorKind.DAMAGED, f"{version}: {len(arrays)} arrays")
    return SavedSession(version, head["session"], arrays)


def read_arrays(saved: SavedSession) -> dict[str, np.ndarray]:
    """Returns every array, verified byte for byte.

    Raises:
        SessionError: DAMAGED, naming the array that is not what was saved.
    """
    import jax.numpy as jnp
    from orbax.checkpoint import v1 as ocp

    abstract = {
        name: np.empty(tuple(fact["shape"]), jnp.dtype(fact["dtype"])) for name, fact in saved.arrays.items()
    }
    filled = {name: array for name, array in abstract.items() if array.size}
    loaded = {**abstract, **_read(saved.folder, lambda: ocp.load(saved.folder, filled))}
    arrays = {name: np.asarray(array) for name, array in loaded.items()}
    for name, fact in saved.arrays.items():
        if _facts(arrays[name]) != fact:
            raise SessionError(
                SessionErrorKind.DAMAGED, f"{saved.folder}: array {name!r} is not what was saved"
            )
    return arrays


def _read(folder: Path, read: Callable[[], Any]) -> Any:
    """Returns what orbax reads, or says in one line why it cannot.

    It raises many kinds of errors for a damaged folder, logs pages about each, and forgets tasks that it has
    started: they are collected here, where nobody is told of them a second time.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return read()
            except Exception as error:
                why = _short(error)
            gc.collect()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    raise SessionError(SessionErrorKind.DAMAGED, f"{folder}: unreadable: {why}")


def erase_session_files(folder: str | Path) -> None:
    """Removes a saved session.

    Raises:
        SessionError: NOT_FOUND or UNSUITABLE_PATH if the folder is no saved session; nothing is removed.
    """
    path = Path(folder)
    _refuse_links(path)
    if not path.is_dir() or not (path / _CURRENT).exists():
        raise SessionError(SessionErrorKind.NOT_FOUND, f"{path} holds no saved session")
    if not _is_session_folder(path):
        raise SessionError(SessionErrorKind.UNSUITABLE_PATH, f"{path} holds more than a saved session")
    shutil.rmtree(path)


def clean_leftovers(folder: Path) -> list[str]:
    """Removes what killed saves left behind; returns their names. What CURRENT names is never touched."""
    try:
        keep = _read_pointer(folder)["version"]
    except SessionError:
        keep = None
        if (folder / _CURRENT).exists():
            return []  # a damaged pointer: somebody may still want to look at the versions
    gone = []
    for entry in sorted(os.listdir(folder)):
        is_ours = _OURS.fullmatch(entry) is not None and entry != keep
        if is_ours and entry != f".{_CURRENT}.{os.getpid()}":
            path = folder / entry
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            gone.append(entry)
    return gone


def _read_pointer(folder: Path) -> dict[str, str]:
    path = folder / _CURRENT
    if not folder.is_dir() or not path.exists():
        raise SessionError(SessionErrorKind.NOT_FOUND, f"{folder} holds no saved session")
    _refuse_links(folder)
    _refuse_links(path)
    try:
        with open(path, "rb") as file:
            pointer = json.loads(file.read(_MAX_POINTER_BYTES).decode("utf-8"))
    except (ValueError, OSError) as error:
        raise SessionError(SessionErrorKind.DAMAGED, f"{path}: unreadable: {_short(error)}") from error
    is_whole = isinstance(pointer, dict) and set(pointer) == {"version", "digest"}
    if not is_whole or not all(isinstance(value, str) for value in pointer.values()):
        raise SessionError(SessionErrorKind.DAMAGED, f"{path} names no version")
    if _VERSION_NAME.fullmatch(pointer["version"]) is None:
        raise SessionError(
            SessionErrorKind.DAMAGED, f"{path} names {pointer['version']!r}, which is not ours"
        )
    return pointer


def _is_session_folder(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    names = (n for n in os.listdir(folder) if n != _CURRENT)
    return all(_OURS.fullmatch(n) for n in names)


def _refuse_links(path: Path) -> None:
    """A link could lead the reader outside of what was saved, or the cleaner outside of what is ours."""
    links = [p for p in (path, *(path.rglob("*") if path.is_dir() else ())) if p.is_symlink()]
    if links:
        raise SessionError(SessionErrorKind.UNSUITABLE_PATH, f"{links[0]} is a link; sessions hold none")


def _facts(array: np.ndarray) -> dict[str, Any]:
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"arrays of {array.dtype} are not saved, only {', '.join(_DTYPES)}")
    contents = np.ascontiguousarray(array).view(np.uint8) if array.size else np.zeros(0, np.uint8)
    checksum = blake2b(contents.reshape(-1).data, digest_size=16).hexdigest()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "blake2b": checksum}


def _num_bytes(fact: Mapping[str, Any]) -> int:
    size = {"bool": 1, "int8": 1, "int32": 4, "int64": 8, "float32": 4, "bfloat16": 2}[fact["dtype"]]
    for length in fact["shape"]:
        size *= int(length)
    return size


def _digest(head: Mapping[str, Any]) -> str:
    text = json.dumps(head, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _sync_tree(folder: Path) -> None:
    """Forces a finished version to disk before anything points at it."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
