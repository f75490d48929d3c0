"""Turns a context into named arrays with a description and back, and refuses what belongs to another engine.

Owns the meaning of a saved session's content and its fingerprint. Files are `session_files`, places are the
program's, names and bindings the manager's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ninfer_jax.errors import SessionError, SessionErrorKind
from ninfer_jax.identity import MediaSpan, PromptIdentity, TokenType
from ninfer_jax.planner.ids import CheckpointKind
from ninfer_jax.program.history import Segment
from ninfer_jax.program.session_snapshot import ContextContents, SavedCheckpoint
from ninfer_jax.session_files import SavedSession, read_arrays


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal for a saved state to mean the same here.

    Attributes:
        model: digest of the geometry; weights: of a sample of every weight's values.
        tokenizer, template: digests of the files that made the tokens.
        page, image: bytes of one packed page and of one state image; `model` and `dtype` give their layout.
    """

    model: str
    weights: str
    tokenizer: str
    template: str
    dtype: str
    page_tokens: int
    page: str
    image: str


@dataclass(frozen=True)
class RestoreReport:
    """What came back of a saved session.

    Attributes:
        tokens: of its endpoint.
        kept: kind and frontier of every checkpoint that is there again.
        dropped: kind, frontier and reason of every other.
    """

    session: str | None
    tokens: int
    kept: tuple[tuple[str, int], ...]
    dropped: tuple[tuple[str, int, str], ...]


def session_arrays(contents: ContextContents) -> dict[str, np.ndarray]:
    """Returns a context as few large arrays."""
    identity = contents.identity
    arrays = {
        "tokens": np.asarray(identity.tokens, np.int32),
        "token_types": np.asarray(identity.token_types, np.int8),
        "positions": np.asarray(identity.positions, np.int32),
        "pages": contents.pages,
    }
    for leaf, parts in enumerate(zip(*contents.images, strict=True)):
        arrays[f"image_{leaf:04d}"] = np.stack(parts)
    return arrays


def session_description(
    contents: ContextContents, fingerprint: Fingerprint, *, session: str | None
) -> dict[str, Any]:
    """Returns everything else about a context as JSON values."""
    identity = contents.identity
    return {
        "fingerprint": asdict(fingerprint),
        "session": session,
        "mode": identity.mode,
        "rope_delta": identity.rope_delta,
        "media": [
            [span.start_tokens, span.end_tokens, int(span.token_type), span.digest.hex()]
            for span in identity.media
        ],
        "rewrite_execution_frontiers": list(identity.rewrite_execution_frontiers),
        "history": [list(segment) for segment in contents.history],
        "checkpoints": [
            [c.kind.name, c.ordinal, c.frontier_tokens, list(c.rebuild), c.image]
            for c in contents.checkpoints
        ],
        "num_images": len(contents.images),
    }


def check_fingerprint(saved: SavedSession, here: Fingerprint) -> None:
    """Returns nothing if the saved state means the same in this engine.

    Raises:
        SessionError: FOREIGN, naming what differs.
    """
    there = saved.description.get("fingerprint")
    if not isinstance(there, Mapping):
        raise SessionError(SessionErrorKind.DAMAGED, f"{saved.folder}: there is no fingerprint")
    differing = [name for name, value in asdict(here).items() if there.get(name) != value]
    if differing:
        facts = "; ".join(
            f"{name}: saved {there.get(name)!r}, here {asdict(here)[name]!r}" for name in differing
        )
        raise SessionError(SessionErrorKind.FOREIGN, f"{saved.folder} is of another engine: {facts}")


def read_contents(saved: SavedSession, *, max_tokens: int) -> ContextContents:
    """Returns the context of a saved session, every byte verified.

    Args:
        saved: its fingerprint was checked.
        max_tokens: the longest context that this engine holds.
    Raises:
        SessionError: TOO_LARGE before any array is read; DAMAGED if parts contradict each other.
    """
    facts = saved.description
    try:
        checkpoints = tuple(
            SavedCheckpoint(CheckpointKind[kind], int(ordinal), int(frontier), _triple(rebuild), int(image))
            for kind, ordinal, frontier, rebuild, image in facts["checkpoints"]
        )
        end = max(checkpoint.frontier_tokens for checkpoint in checkpoints)
        (num_tokens,) = saved.shape("tokens")
        if end > max_tokens:
            raise SessionError(
                SessionErrorKind.TOO_LARGE,
                f"{saved.folder} holds {end} tokens, max_context here is {max_tokens}",
            )
        page_tokens = int(facts["fingerprint"]["page_tokens"])
        if num_tokens != end or saved.shape("pages")[0] != -(-end // page_tokens):
            raise ValueError(
                f"{num_tokens} tokens and {saved.shape('pages')[0]} pages for a frontier of {end}"
            )
        arrays = read_arrays(saved)
        identity = PromptIdentity(
            arrays["tokens"],
            arrays["token_types"],
            arrays["positions"],
            int(facts["rope_delta"]),
            tuple(
                MediaSpan(int(start), int(stop), TokenType(kind), bytes.fromhex(digest))
                for start, stop, kind, digest in facts["media"]
            ),
            str(facts["mode"]),
            tuple(int(frontier) for frontier in facts["rewrite_execution_frontiers"]),
        )
        if identity.positions.shape != (3, end) or identity.token_types.shape != (end,):
            raise ValueError(f"positions {identity.positions.shape} for {end} tokens")
        leaves = [arrays[name] for name in sorted(arrays) if name.startswith("image_")]
        images = tuple(tuple(leaf[i] for leaf in leaves) for i in range(int(facts["num_images"])))
        if not leaves or any(c.image not in range(len(images)) for c in checkpoints):
            raise ValueError("a checkpoint has no image")
        history = tuple(Segment(*segment) for segment in facts["history"])
    except SessionError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SessionError(SessionErrorKind.DAMAGED, f"{saved.folder}: {error}") from error
    for array in (identity.tokens, identity.token_types, identity.positions):
        array.setflags(write=False)
    return ContextContents(identity, history, checkpoints, images, arrays["pages"])


def _triple(values: Any) -> tuple[int, int, int]:
    first, second, third = (int(value) for value in values)
    return first, second, third
