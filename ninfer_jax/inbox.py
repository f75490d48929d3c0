"""The messages that reach the worker from other threads.

Owns their types only. The queue between the threads is a ``queue.SimpleQueue``: its ``put`` is re-entrant,
so a garbage collector's callback may send one.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ninfer_jax.handle import Response
    from ninfer_jax.job import Job


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A new request that already holds its outstanding slot."""

    job: Job


@dataclass(frozen=True, slots=True, eq=False)
class Cancel:
    """The consumer asks for the end; the flag in the response is already set."""

    response: Response


@dataclass(frozen=True, slots=True, eq=False)
class Abandon:
    """The consumer's handle is gone: nobody will read the answer."""

    response: Response


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A question answered by the worker at a stable boundary."""

    question: Callable[[], Any]
    answers: queue.SimpleQueue[tuple[bool, Any]]  # (True, answer) or (False, exception)


@dataclass(frozen=True, slots=True, eq=False)
class Close:
    """End every request, free the device and stop."""


Message: TypeAlias = Submit | Cancel | Abandon | Ask | Close
Inbox: TypeAlias = "queue.SimpleQueue[Message]"
