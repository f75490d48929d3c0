"""What one request is: its states, its cache hints, and the facts that the shell passes between its parts.

Owns the lifecycle table (Q-1) and the validation of hints. Holds no queue, no lane, no page and no text: the
scheduler orders requests, the program holds what they occupy, and ``handle`` carries their answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NewType, TypedDict, get_args

from ninfer_jax.checks import MAX_INT32, check_choice, checked_flag, checked_integer
from ninfer_jax.errors import InvariantError, OptionError
from ninfer_jax.identity import Evidence, PromptIdentity

RequestId = NewType("RequestId", int)

MAX_MARKERS = 4  # N-4: fixed, not a knob (F-2)
MAX_SESSION_BYTES = 256  # conventions 1


class AdmissionStatus(Enum):
    """Whether one request could become Active now: exactly four answers (G-14)."""

    PERMANENTLY_INFEASIBLE = "permanently_infeasible"  # not even alone, from root, on an empty device (G-5)
    TEMPORARILY_BLOCKED = "temporarily_blocked"  # lanes, active guarantees or a transition are in the way
    NEEDS_TRANSFER = "needs_transfer"  # feasible after copies between tiers
    READY = "ready"


@dataclass(frozen=True, slots=True)
class SequenceHandle:
    """Names one activation of a lane; a later one has another generation and rejects this handle (REV-06)."""

    lane: int
    generation: int


class RequestState(Enum):
    """Where one request stands (Q-1)."""

    WAITING = "waiting"
    MATERIALIZING = "materializing"
    PREFILL = "prefill"
    DECODE_READY = "decode_ready"
    CONTROL_READY = "control_ready"
    TERMINAL_PENDING = "terminal_pending"
    FINISHED = "finished"


_NEXT_STATES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.MATERIALIZING, RequestState.FINISHED}),
    # back to WAITING when a transition aborts before anything was published
    RequestState.MATERIALIZING: frozenset(
        {RequestState.PREFILL, RequestState.WAITING, RequestState.FINISHED}
    ),
    RequestState.PREFILL: frozenset(
        {RequestState.DECODE_READY, RequestState.CONTROL_READY, RequestState.TERMINAL_PENDING}
    ),
    RequestState.DECODE_READY: frozenset({RequestState.CONTROL_READY, RequestState.TERMINAL_PENDING}),
    RequestState.CONTROL_READY: frozenset({RequestState.DECODE_READY, RequestState.TERMINAL_PENDING}),
    RequestState.TERMINAL_PENDING: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


def checked_transition(current: RequestState, following: RequestState) -> RequestState:
    """Returns ``following``.

    Raises:
        InvariantError: if the lifecycle has no such step; nothing may leave FINISHED.
    """
    if following not in _NEXT_STATES[current]:
        raise InvariantError(f"a request cannot go from {current.value} to {following.value}")
    return following


MarkerKind = Literal["shared_stable_prefix", "private_long_anchor"]
MarkerPlace = Literal["message", "message_part", "leading_instructions", "tools"]
Retention = Literal["disposable", "recent_private", "live_session"]
CacheMode = Literal["read_write", "disabled"]
# The other two flags are the engine's own word (E-1); a caller cannot claim them.
CALLER_EVIDENCE = Evidence.EXPLICIT_BOUNDARY | Evidence.REQUESTED_AUTOMATIC | Evidence.DEFAULT_AUTOMATIC


@dataclass(frozen=True)
class CacheMarker:
    """A boundary that the caller names inside its prompt.

    ``count`` belongs to ``place``: messages before the boundary, parts of the last of them, leading
    instruction messages, or tools.
    """

    count: int
    kind: MarkerKind = "shared_stable_prefix"
    place: MarkerPlace = "message"
    evidence: Evidence = Evidence.EXPLICIT_BOUNDARY


@dataclass(frozen=True)
class RequestHints:
    """What a caller may say about reuse; hints never prove a hit (C-6). Built by ``make_request_hints``."""

    session: str | None
    retention: Retention
    cache: CacheMode
    markers: tuple[CacheMarker, ...]
    allow_engine_automatic_shared_prefixes: bool
    allow_engine_prefix_grid: bool
    automatic_private_anchors: int
    update_session_index: bool


class HintArguments(TypedDict, total=False):
    """The hints by name, as ``submit`` takes them; ``make_request_hints`` says what they mean."""

    session: str | None
    retention: Retention | None
    cache: CacheMode
    markers: Iterable[CacheMarker]
    allow_engine_automatic_shared_prefixes: bool
    allow_engine_prefix_grid: bool
    automatic_private_anchors: int | None
    update_session_index: bool


def checked_session(session: str) -> str:
    """Returns a session key that requests may carry.

    Raises:
        OptionError: if it is no text of 1 to 256 bytes in UTF-8.
    """
    if not isinstance(session, str):
        raise OptionError(f"session: got {type(session).__name__}, expected text or None")
    size_bytes = len(session.encode("utf-8", "surrogatepass"))
    if not 1 <= size_bytes <= MAX_SESSION_BYTES:
        raise OptionError(f"session: got {size_bytes} bytes, expected 1..{MAX_SESSION_BYTES}")
    return session


def check_hint_names(hints: Mapping[str, object]) -> None:
    """Returns nothing when every name is a hint.

    Raises:
        OptionError: naming the one that is not, and those that are.
    """
    unknown = sorted(set(hints) - set(HintArguments.__annotations__))
    if unknown:
        known = ", ".join(HintArguments.__annotations__)
        raise OptionError(f"unknown argument {unknown[0]}; the hints of a request are {known}")


def make_request_hints(
    *,
    cache_enabled: bool,
    max_long_anchors: int,
    session: str | None = None,
    retention: Retention | None = None,
    cache: CacheMode = "read_write",
    markers: Iterable[CacheMarker] = (),
    allow_engine_automatic_shared_prefixes: bool = True,
    allow_engine_prefix_grid: bool = False,
    automatic_private_anchors: int | None = None,
    update_session_index: bool = True,
) -> RequestHints:
    """Returns the hints of one request with every default filled in.

    Args:
        cache_enabled: the engine's own switch; where it is off every request runs ``disabled`` (F-4).
        max_long_anchors: the engine's bound per continuation; default of ``automatic_private_anchors``.
        session: 1..256 bytes in UTF-8; only for lookup and binding (Y-3).
        retention: default ``live_session`` with a session, ``recent_private`` without.
        cache: ``disabled`` means root only, and nothing left behind (C-10).
        markers: at most 4; a fifth is an error, never a truncation.
        automatic_private_anchors: how many message boundaries become private anchors (N-6).
    Raises:
        OptionError: naming the hint, what it got and what it expects.
    """
    if session is not None:
        checked_session(session)
    check_choice("cache", cache, get_args(CacheMode))
    if retention is None:
        retention = "recent_private" if session is None else "live_session"
    check_choice("retention", retention, get_args(Retention))
    if retention == "live_session" and session is None:
        raise OptionError(
            "retention: got 'live_session' without a session; name one, or use 'recent_private'"
        )
    anchors = max_long_anchors if automatic_private_anchors is None else automatic_private_anchors
    anchors = checked_integer("automatic_private_anchors", anchors, 0, MAX_INT32, expected="0 or more")
    caching = cache_enabled and cache == "read_write"
    return RequestHints(
        session=session,
        retention=retention,
        cache="read_write" if caching else "disabled",
        markers=_checked_markers(markers),
        allow_engine_automatic_shared_prefixes=checked_flag(
            "allow_engine_automatic_shared_prefixes", allow_engine_automatic_shared_prefixes
        ),
        allow_engine_prefix_grid=checked_flag("allow_engine_prefix_grid", allow_engine_prefix_grid),
        automatic_private_anchors=min(anchors, max_long_anchors) if caching else 0,
        update_session_index=checked_flag("update_session_index", update_session_index),
    )


def _checked_markers(markers: Iterable[CacheMarker]) -> tuple[CacheMarker, ...]:
    if not isinstance(markers, Iterable):
        raise OptionError(f"markers: got {markers!r}, expected a sequence of CacheMarker")
    checked = tuple(markers)
    if len(checked) > MAX_MARKERS:
        raise OptionError(
            f"markers: got {len(checked)}, expected at most {MAX_MARKERS}; drop the earliest ones"
        )
    for position, marker in enumerate(checked):
        name = f"markers[{position}]"
        if not isinstance(marker, CacheMarker):
            raise OptionError(f"{name}: got {type(marker).__name__}, expected CacheMarker")
        check_choice(f"{name}.kind", marker.kind, get_args(MarkerKind))
        check_choice(f"{name}.place", marker.place, get_args(MarkerPlace))
        checked_integer(f"{name}.count", marker.count, 0, MAX_INT32, expected="0 or more")
        if not isinstance(marker.evidence, Evidence) or marker.evidence & ~CALLER_EVIDENCE:
            raise OptionError(
                f"{name}.evidence: got {marker.evidence!r}, expected flags of {CALLER_EVIDENCE!r}"
            )
        if marker.kind == "shared_stable_prefix" and not marker.evidence:
            raise OptionError(f"{name}.evidence: a shared marker needs at least one evidence flag")
    return checked


@dataclass(frozen=True, eq=False)
class Request:
    """One accepted request, as immutable as when it was submitted.

    ``publication_order`` grows with every submission and decides which finisher owns a session binding (Y-4).
    """

    request_id: RequestId
    publication_order: int
    identity: PromptIdentity
    hints: RequestHints
    submitted_ns: int
    pending_deadline_ns: int
    deadline_ns: int | None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.identity.tokens)
