"""The two ends of one answer: ``Response``, which the worker fills, and ``RequestHandle``, which a consumer
holds.

Owns how events cross threads and when a consumer counts as gone. The worker never sees a handle, so a
dropped one can be noticed; a handle never changes engine state, it only sends messages.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ninfer_jax.errors import InvariantError, RequestError
from ninfer_jax.inbox import Abandon, Cancel
from ninfer_jax.request import RequestId
from ninfer_jax.results import Event, Finished, GenerationResult, TextDelta, TokenLogprobs

if TYPE_CHECKING:
    from ninfer_jax.frontend.output import Delta
    from ninfer_jax.inbox import Inbox
    from ninfer_jax.outstanding import OutstandingSlot


class CommittedToken(NamedTuple):
    """One row of a commit as the worker has it; its events are built by the thread that reads them."""

    token: int
    deltas: tuple[Delta, ...]
    logprobs: TokenLogprobs | None

    def events(self) -> tuple[TextDelta, ...]:
        """Returns a delta for each piece of text, the last one with the token; at least one."""
        logprobs = None if self.logprobs is None else (self.logprobs,)
        if not self.deltas:
            return (TextDelta("", "content", (self.token,), logprobs),)
        *head, last = self.deltas
        return (
            *(TextDelta(delta.text, delta.channel, (), None) for delta in head),
            TextDelta(last.text, last.channel, (self.token,), logprobs),
        )


Batch: TypeAlias = tuple[Event, ...] | CommittedToken


class Response:
    """The worker's end: publishes batches of events, then exactly one end.

    Args:
        request_id: whose answer this is.
        slot: the request's place among the outstanding ones.
        wants_events: False when the consumer reads only the result; then no event is ever built.
        on_end: called in the worker's thread after the end is visible; must not block.
    """

    __slots__ = ("_done", "_error", "_events", "_on_end", "_result", "cancel_requested", "request_id", "slot")

    def __init__(
        self,
        request_id: RequestId,
        slot: OutstandingSlot,
        *,
        wants_events: bool,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.slot = slot
        self.cancel_requested = False  # set by consumers, read by the worker at boundaries
        self._events: queue.SimpleQueue[Batch] | None = queue.SimpleQueue() if wants_events else None
        self._done = threading.Event()
        self._result: GenerationResult | None = None
        self._error: RequestError | None = None
        self._on_end = on_end

    @property
    def wants_events(self) -> bool:
        """Whether somebody may iterate over the events."""
        return self._events is not None

    @property
    def is_done(self) -> bool:
        """Whether the end is visible."""
        return self._done.is_set()

    def publish(self, batch: Batch) -> None:
        """Makes committed output visible; one queue operation whatever the number of events."""
        if self._events is not None:
            self._events.put(batch)

    def finish(self, result: GenerationResult) -> None:
        """Ends the answer with its result."""
        self._end(result, None, (Finished(result),))

    def fail(self, error: RequestError) -> None:
        """Ends the answer without a result."""
        self._end(None, error, ())

    def _end(
        self, result: GenerationResult | None, error: RequestError | None, last: tuple[Event, ...]
    ) -> None:
        if self._done.is_set():
            raise InvariantError(f"request {self.request_id} ended twice")
        self._result, self._error = result, error
        self._done.set()
        if self._events is not None:
            self._events.put(last)
        self.slot.response_done()
        if self._on_end is not None:
            self._on_end()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the end; False when the time passed first."""
        return self._done.wait(timeout_s)

    def outcome(self) -> GenerationResult:
        """Returns the result of an ended answer.

        Raises:
            RequestError: if it failed.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise InvariantError(f"request {self.request_id} was read before its end")
        return self._result

    def next_events(self) -> tuple[Event, ...]:
        """Returns the next batch, waiting for it; the empty batch is the end of a failed answer."""
        if self._events is None:
            raise InvariantError(f"request {self.request_id} was submitted without events")
        batch = self._events.get()
        return batch.events() if isinstance(batch, CommittedToken) else batch

    def has_events(self) -> bool:
        """Whether a batch is ready."""
        return self._events is not None and not self._events.empty()


class RequestHandle:
    """A consumer's end of one answer. Dropping it before the end cancels the request.

    Any thread may call ``cancel`` and ``result``; one thread iterates. The request's place in the engine
    comes back once the answer has ended and was read to its end, closed, or dropped (Q-6).

    Args:
        response: the worker's end.
        inbox: where messages to the worker go.
        pump: None where a worker thread runs; else a function that does one step and says whether it did
            anything.
        keep_alive: held as long as the handle, so that an engine does not vanish under a pending answer.
    """

    def __init__(
        self,
        response: Response,
        inbox: Inbox,
        *,
        pump: Callable[[], bool] | None = None,
        keep_alive: object = None,
    ) -> None:
        self._response = response
        self._inbox = inbox
        self._pump = pump
        self._keep_alive = keep_alive
        self._was_iterated = False
        self._finalizer = weakref.finalize(self, inbox.put, Abandon(response))
        self._finalizer.atexit = False  # at exit the engine's own end covers every request

    @property
    def request_id(self) -> RequestId:
        """The engine's number for this request."""
        return self._response.request_id

    def done(self) -> bool:
        """Whether the answer has ended, well or not."""
        return self._response.is_done

    def cancel(self) -> None:
        """Asks for the end at the next stable boundary; the answer so far stays. Harmless after the end."""
        if not self._response.is_done:
            self._response.cancel_requested = True
            self._inbox.put(Cancel(self._response))

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Returns the whole answer, waiting for it.

        Args:
            timeout: seconds to wait; the request itself goes on when they pass. Without a worker thread this
                call does the work itself and never waits.
        Raises:
            RequestError: if the request was refused or failed; ``kind`` says why.
            TimeoutError: if the answer had not ended in time.
        """
        if self._pump is not None:
            self._pump_until(lambda: self._response.is_done)
        elif not self._response.wait(timeout):
            raise TimeoutError(f"request {self.request_id} has not ended within {timeout} s")
        self._release()
        return self._response.outcome()

    def __iter__(self) -> Iterator[Event]:
        """Yields committed events up to ``Finished``; a single pass.

        Raises:
            RequestError: where the request failed.
        """
        while not self._was_iterated:
            if self._pump is not None:
                self._pump_until(self._response.has_events)
            batch = self._response.next_events()
            if not batch or isinstance(batch[-1], Finished):
                self._was_iterated = True
                self._release()
            if not batch:
                self._response.outcome()
            yield from batch

    def close(self) -> None:
        """Gives the request up: cancels it if it runs, and returns its place."""
        self._finalizer()

    def _release(self) -> None:
        if self._finalizer.detach() is not None:
            self._response.slot.consumer_released()

    def _pump_until(self, is_reached: Callable[[], bool]) -> None:
        assert self._pump is not None
        while not is_reached():
            if not self._pump() and not is_reached():
                raise InvariantError(f"the engine is idle, yet request {self.request_id} has not ended")
