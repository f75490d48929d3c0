"""How many requests may be unfinished or unread at once, and the slot each of them holds.

Owns the count and its bound, shared by every thread. A slot comes back when the response is done *and* the
consumer has let go, once, in either order (Q-6): an unread answer is memory too.
"""

from __future__ import annotations

import threading


class OutstandingGate:
    """Counts held slots against a fixed limit; the only holder of the count.

    Nothing here may run inside a garbage collector's callback, which could interrupt a change half done:
    abandoned handles go through the worker's inbox instead.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        """Slots there are."""
        return self._limit

    @property
    def held(self) -> int:
        """Slots taken now."""
        return self._held

    def try_acquire(self) -> OutstandingSlot | None:
        """Returns a slot, or None when all are taken."""
        with self._changed:
            if self._held >= self._limit:
                return None
            self._held += 1
        return OutstandingSlot(self)

    def wait_for_room(self, timeout_s: float) -> None:
        """Waits for a free slot, for ``wake``, or until the time has passed; the caller looks again."""
        with self._changed:
            if self._held >= self._limit:
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Wakes everyone who waits for room, so that they notice that the engine closed."""
        with self._changed:
            self._changed.notify_all()

    def _settle(self, slot: OutstandingSlot, response_done: bool, consumer_released: bool) -> None:
        with self._changed:
            was_open = not (slot._response_done and slot._consumer_released)
            slot._response_done |= response_done
            slot._consumer_released |= consumer_released
            if was_open and slot._response_done and slot._consumer_released:
                self._held -= 1
                self._changed.notify_all()


class OutstandingSlot:
    """One request's place; both sides may report often, only the first report of each counts."""

    __slots__ = ("_consumer_released", "_gate", "_response_done")

    def __init__(self, gate: OutstandingGate) -> None:
        self._gate = gate
        self._response_done = False
        self._consumer_released = False

    def response_done(self) -> None:
        """The worker will publish nothing more."""
        self._gate._settle(self, response_done=True, consumer_released=False)

    def consumer_released(self) -> None:
        """The consumer has read the end, or is gone."""
        self._gate._settle(self, response_done=False, consumer_released=True)
