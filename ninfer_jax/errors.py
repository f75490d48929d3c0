"""The NinferError family: mistakes and broken contracts raise, expected outcomes are values elsewhere."""

from __future__ import annotations

from enum import Enum


class NinferError(Exception):
    """Base of every error this package raises on purpose."""


class OptionError(NinferError, ValueError):
    """An option is out of range or contradicts another; the message names field, value and bound (F-3)."""


class PromptError(NinferError, ValueError):
    """A prompt or message list cannot be represented; the message says what was got and what to change."""


class RequestErrorKind(Enum):
    """Why one request was refused or ended without an answer, while the engine goes on (Q-7)."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    OVERLOADED = "overloaded"
    QUEUE_TIMEOUT = "queue_timeout"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    FAULT = "fault"


class RequestError(NinferError):
    """One request ended without a complete answer; ``kind`` says why."""

    def __init__(self, kind: RequestErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SessionErrorKind(Enum):
    """Why a saved session was refused; the engine is as it was."""

    NOT_FOUND = "not_found"
    DAMAGED = "damaged"
    NEWER_FORMAT = "newer_format"
    FOREIGN = "foreign"  # of another model, tokenizer, layout or dtype
    TOO_LARGE = "too_large"  # its endpoint does not fit this engine
    BUSY = "busy"  # a transition is open, or the context is being read
    UNSUITABLE_PATH = "unsuitable_path"


class SessionError(NinferError):
    """A session could not be saved or restored; ``kind`` says why, and nothing was changed."""

    def __init__(self, kind: SessionErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EngineClosedError(NinferError):
    """The engine was closed, or latched a failure, before this call."""


class StaleHandleError(NinferError):
    """A handle's generation no longer matches its slot; nothing was changed (R-12)."""


class StalePlanError(NinferError):
    """A plan was sealed against a state that is no longer the current one; it had no effect (X-2)."""


class PlanConsumedError(NinferError):
    """A sealed plan was started before; a plan runs once (X-1)."""


class ContractError(NinferError):
    """A call came out of order or with values it may not have; it was refused before anything changed."""


class InvariantError(NinferError):
    """Two numbers that must agree do not; the engine treats it as an engine-wide failure (Q-7)."""
