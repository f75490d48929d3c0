"""Saved sessions of one engine: from the worker's hands to files and back (C-11).

Owns the order of those steps, so that files are read and written in the caller's thread and the worker is
held only to start a copy; and the folder names of a session directory. What a file holds is the business of
`session_store`, places are the program's, names and bindings the manager's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from ninfer_jax.errors import SessionError, SessionErrorKind
from ninfer_jax.options import PAGE_TOKENS
from ninfer_jax.session_files import open_session_files, read_arrays, save_session_files
from ninfer_jax.session_store import (
    Fingerprint,
    RestoreReport,
    check_fingerprint,
    read_contents,
    session_arrays,
    session_description,
)

if TYPE_CHECKING:
    from ninfer_jax.parts import EngineParts
    from ninfer_jax.worker import Worker

logger = logging.getLogger("ninfer_jax")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class SessionFacts:
    """What a saved session says of itself, without its arrays."""

    path: Path
    session: str | None
    tokens: int
    checkpoints: tuple[tuple[str, int], ...]  # kind and frontier
    num_bytes: int


class EngineSessions:
    """Saves and restores for one engine.

    Args:
        parts: of the engine.
        worker: the engine's.
        ask: has a question answered by the worker at its next stable boundary.
        next_order: gives publication orders, from the same count as requests get theirs.
    """

    def __init__(
        self,
        parts: EngineParts,
        worker: Worker,
        ask: Callable[[Callable[[], Any]], Any],
        next_order: Callable[[], int],
    ) -> None:
        self._parts = parts
        self._worker = worker
        self._ask = ask
        self._next_order = next_order
        self._fingerprint: Fingerprint | None = None

    def save(self, session: str, path: str | Path) -> Path:
        """Returns the folder of the new version."""
        read = self._ask(lambda: self._worker.read_session(session))
        contents = read()  # here, so that the worker goes on meanwhile
        description = session_description(contents, self._own_fingerprint(), session=session)
        return save_session_files(Path(path), session_arrays(contents), description)

    def restore(self, path: str | Path, session: str | None) -> RestoreReport:
        """Returns what came back; the context is found by its tokens, and by `session` when given."""
        saved = open_session_files(Path(path))
        check_fingerprint(saved, self._own_fingerprint())
        contents = read_contents(saved, max_tokens=self._parts.options.max_context)
        order = self._next_order()
        return self._ask(lambda: self._worker.adopt_session(contents, session, order))

    def save_all(self, directory: Path) -> list[Path]:
        """Saves every session that is bound, each into a folder of its own; skips what cannot be saved."""
        paths = []
        for session in self._ask(self._worker.bound_sessions):
            try:
                paths.append(self.save(session, directory / folder_name(session)))
            except Exception as error:  # one that fails must keep neither the others nor the engine's end
                logger.warning("session %r was not saved: %s", session, error)
        return paths

    def restore_all(self, directory: Path) -> list[RestoreReport]:
        """Restores every session of a directory; what is refused is logged and left on disk."""
        reports = []
        for path in sorted(directory.iterdir()):
            try:
                reports.append(self.restore(path, inspect_session(path).session))
            except Exception as error:  # a bad file must not keep the engine from starting
                is_other = isinstance(error, SessionError) and error.kind is SessionErrorKind.NOT_FOUND
                if not is_other:
                    logger.warning("%s was not restored: %s", path, error)
        return reports

    def _own_fingerprint(self) -> Fingerprint:
        if self._fingerprint is None:
            model, capacity = self._parts.model, self._parts.program.capacity
            self._fingerprint = Fingerprint(
                model=model.signature,
                weights=self._ask(self._parts.program.weights_digest),
                tokenizer=model.tokenizer_digest,
                template=model.template_digest,
                dtype=model.dtype,
                page_tokens=PAGE_TOKENS,
                page=f"{capacity.pools[0].page_bytes} bytes",
                image=f"{capacity.state_image_bytes} bytes",
            )
        return self._fingerprint


def folder_name(session: str) -> str:
    """Returns a folder name for any session key: readable, safe, and different for different keys."""
    digest = blake2b(session.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{quote(session, safe='', errors='replace').replace('.', '%2E')[:80]}-{digest}"


def list_saved_sessions(directory: str | Path) -> list[SessionFacts]:
    """Returns what a directory holds, by name; folders that are no readable session are left out.

    Raises:
        SessionError: NOT_FOUND if there is no such directory.
    """
    root = Path(directory)
    if not root.is_dir():
        raise SessionError(SessionErrorKind.NOT_FOUND, f"{root} is no directory")
    found = []
    for path in sorted(root.iterdir()):
        try:
            found.append(inspect_session(path))
        except SessionError:
            continue
    return found


def inspect_session(path: str | Path) -> SessionFacts:
    """Returns what a saved session says of itself; no array is read.

    Raises:
        SessionError: saying what is wrong.
    """
    saved = open_session_files(Path(path))
    try:
        checkpoints = tuple((str(c[0]).lower(), int(c[2])) for c in saved.description["checkpoints"])
        session = saved.description["session"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SessionError(SessionErrorKind.DAMAGED, f"{path}: {error}") from error
    tokens = max((frontier for _, frontier in checkpoints), default=0)
    return SessionFacts(Path(path), session, tokens, checkpoints, saved.num_bytes)


def verify_session(path: str | Path) -> SessionFacts:
    """Returns the same after reading and checking every byte.

    Raises:
        SessionError: naming what is damaged.
    """
    facts = inspect_session(path)
    read_arrays(open_session_files(Path(path)))
    return facts
