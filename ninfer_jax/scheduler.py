"""Which request is tried and which unit of work comes next: the bounded FIFO, its deadlines, and the lane
order.

Sees readiness answers and nothing physical (D-1): no page, no slot, no placement, no cache value ever orders
a request. ``choose`` is the whole policy, a pure function of a ``BoundaryView``; ``Scheduler`` holds the
queue.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ninfer_jax.errors import InvariantError
from ninfer_jax.request import AdmissionStatus, RequestId

NO_DEADLINE_NS = 2**63 - 1
BACKFILL_WINDOW = 4  # how many requests behind a blocked head are looked at for each change of resources


@dataclass(frozen=True, slots=True)
class Admit:
    """Plan one waiting request and, if it is ready, make it Active."""

    request_id: RequestId
    head: RequestId | None = None  # the blocked head that must stay possible, when this one is not it


@dataclass(frozen=True, slots=True)
class Prefill:
    """Advance one lane's prompt by one chunk."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Decode:
    """Draw one token for exactly these rows (Q-3)."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can be done before a message, a deadline or a change of resources."""


Action: TypeAlias = Admit | Prefill | Decode | Idle
IDLE = Idle()


@dataclass(frozen=True, slots=True)
class BoundaryView:
    """All that a choice may depend on at one stable boundary."""

    head: RequestId | None  # the oldest waiting request
    head_is_blocked: bool  # its last answer was "temporarily blocked" and nothing has changed since
    backfill: RequestId | None  # the oldest behind a blocked head that was not refused since
    may_admit: bool  # no transition is open
    free_lanes: int
    prefilling: tuple[RequestId, ...]  # in order of admission
    decode_ready: tuple[RequestId, ...]  # in order of their first token
    prefill_was_last: bool  # the last unit was a prefill chunk: the next is a decode round, if there is one


def choose(view: BoundaryView) -> Action:
    """Returns the next unit of work (Q-3).

    ======================  ==========  ============  ================  ============
    one can be tried        prefilling  decode ready  last was prefill  choice
    ======================  ==========  ============  ================  ============
    yes, and a lane free    any         any           any               Admit
    no                      yes         no            any               Prefill
    no                      yes         yes           no                Prefill
    no                      yes         yes           yes               Decode
    no                      no          yes           any               Decode
    no                      no          no            any               Idle
    ======================  ==========  ============  ================  ============

    The head is tried first; only behind a blocked head may a later request be, under proof (A-7, Q-4).
    Neither side starves: with both present they alternate, and the oldest prompt goes first, so a prompt
    waits for no more than the chunks of the C - 1 prompts admitted before it.
    """
    if view.head is not None and view.may_admit and view.free_lanes > 0:
        if not view.head_is_blocked:
            return Admit(view.head)
        if view.backfill is not None:
            return Admit(view.backfill, head=view.head)
    if view.prefilling and not (view.decode_ready and view.prefill_was_last):
        return Prefill(view.prefilling[0])
    if view.decode_ready:
        return Decode(view.decode_ready)
    return IDLE


class AdmissionVerdict(Enum):
    """What the answer about the head means for it."""

    START = "start"
    KEEP_WAITING = "keep_waiting"
    REJECT_TOO_LARGE = "reject_too_large"  # not even alone on this engine
    REJECT_OVERLOADED = (
        "reject_overloaded"  # blocked with nothing active: nothing will ever free it (design 6)
    )


def judge(status: AdmissionStatus, num_active: int) -> AdmissionVerdict:
    """Returns what follows from one readiness answer; ``num_active`` counts requests that hold a lane."""
    if status is AdmissionStatus.PERMANENTLY_INFEASIBLE:
        return AdmissionVerdict.REJECT_TOO_LARGE
    if status is AdmissionStatus.TEMPORARILY_BLOCKED:
        return AdmissionVerdict.KEEP_WAITING if num_active else AdmissionVerdict.REJECT_OVERLOADED
    return AdmissionVerdict.START


class Scheduler:
    """Holds the queue and the order of the lanes; the only holder of both.

    Args:
        num_lanes: C.
        max_waiting: bound of the queue.
    """

    def __init__(self, num_lanes: int, max_waiting: int) -> None:
        self._num_lanes = num_lanes
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[RequestId, int]] = deque()
        self._prefilling: tuple[RequestId, ...] = ()
        self._decode_ready: tuple[RequestId, ...] = ()
        self._materializing: RequestId | None = None
        self._ending: tuple[RequestId, ...] = ()
        self._prefill_was_last = False
        self._blocked_at: dict[RequestId, int] = {}  # waiting requests: revision at which they were refused
        self._donors: tuple[RequestId, tuple[RequestId, ...]] | None = None
        self._first_deadline_ns = NO_DEADLINE_NS

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """The queue, oldest first."""
        return tuple(request_id for request_id, _ in self._waiting)

    @property
    def num_waiting(self) -> int:
        """Length of the queue."""
        return len(self._waiting)

    @property
    def active(self) -> tuple[RequestId, ...]:
        """Every request that holds a lane."""
        materializing = () if self._materializing is None else (self._materializing,)
        return materializing + self._prefilling + self._decode_ready + self._ending

    @property
    def runnable(self) -> int:
        """Requests that could run a model step now; planning makes them wait (G-10)."""
        return len(self._prefilling) + len(self._decode_ready)

    @property
    def materializing(self) -> RequestId | None:
        """The request whose transition is open."""
        return self._materializing

    @property
    def num_active(self) -> int:
        """Lanes in use."""
        return len(self.active)

    @property
    def first_deadline_ns(self) -> int:
        """When the next waiting request expires; ``NO_DEADLINE_NS`` when none does."""
        return self._first_deadline_ns

    def enqueue(self, request_id: RequestId, deadline_ns: int) -> bool:
        """Puts a request at the end of the queue; False when it is full."""
        if len(self._waiting) >= self._max_waiting:
            return False
        self._waiting.append((request_id, deadline_ns))
        self._first_deadline_ns = min(self._first_deadline_ns, deadline_ns)
        return True

    def drop_waiting(self, request_id: RequestId) -> None:
        """Takes a request out of the queue, wherever it stands; the others keep their order."""
        kept = [entry for entry in self._waiting if entry[0] != request_id]
        if len(kept) == len(self._waiting):
            raise InvariantError(f"request {request_id} is not waiting")
        self._waiting = deque(kept)
        self._blocked_at.pop(request_id, None)
        self._first_deadline_ns = min((deadline for _, deadline in kept), default=NO_DEADLINE_NS)

    def expired(self, now_ns: int) -> tuple[RequestId, ...]:
        """The waiting requests whose deadline has come, oldest first."""
        if now_ns < self._first_deadline_ns:
            return ()
        return tuple(request_id for request_id, deadline_ns in self._waiting if deadline_ns <= now_ns)

    def next_action(self, resource_revision: int, *, may_admit: bool = True) -> Action:
        """Returns the next unit of work.

        Args:
            resource_revision: the program's; a refused request is tried again only after it moved (G-14).
            may_admit: no transition is open.
        """
        return choose(self.view(resource_revision, may_admit=may_admit))

    def view(self, resource_revision: int, *, may_admit: bool = True) -> BoundaryView:
        """Returns what ``choose`` looks at."""
        head = backfill = None
        is_blocked = False
        if self._waiting:
            head = self._waiting[0][0]
            is_blocked = self._blocked_at.get(head) == resource_revision
            if is_blocked and may_admit:
                near = itertools.islice(self._waiting, 1, 1 + BACKFILL_WINDOW)
                backfill = next((r for r, _ in near if self._blocked_at.get(r) != resource_revision), None)
        return BoundaryView(
            head=head,
            head_is_blocked=is_blocked,
            backfill=backfill,
            may_admit=may_admit,
            free_lanes=self._num_lanes - self.num_active,
            prefilling=self._prefilling,
            decode_ready=self._decode_ready,
            prefill_was_last=self._prefill_was_last,
        )

    def block(self, request_id: RequestId, resource_revision: int) -> None:
        """Remembers that a waiting request was refused at this revision.

        When the head is refused for the first time, the requests that are active then become its donors: what
        it waits for. Whoever starts later counts as staying (A-7).
        """
        self._blocked_at[request_id] = resource_revision
        if request_id == self._waiting[0][0] and (self._donors is None or self._donors[0] != request_id):
            self._donors = (request_id, self.active)

    def donors(self, head: RequestId) -> tuple[RequestId, ...]:
        """Returns the requests that a blocked head waits for and that are still active (Q-4)."""
        if self._donors is None or self._donors[0] != head:
            return ()
        return tuple(donor for donor in self._donors[1] if donor in self.active)

    def begin(self, request_id: RequestId) -> None:
        """Moves a waiting request to a lane, where it materialises."""
        if self.num_active >= self._num_lanes:
            raise InvariantError(f"request {request_id} needs a lane, all {self._num_lanes} are in use")
        if self._materializing is not None:
            raise InvariantError(f"request {self._materializing} is materialising already (X-6)")
        self.drop_waiting(request_id)
        self._materializing = request_id

    def activate(self, request_id: RequestId) -> None:
        """Lets a materialised request prefill."""
        if self._materializing != request_id:
            raise InvariantError(f"request {request_id} is not materialising")
        self._materializing = None
        self._prefilling = (*self._prefilling, request_id)

    def retire(self, request_id: RequestId) -> None:
        """Stops a request that has ended; it holds its lane until it leaves (A-5)."""
        self.leave(request_id)
        self._ending = (*self._ending, request_id)

    def prefilled_chunk(self, request_id: RequestId, *, is_complete: bool) -> None:
        """Records one chunk; a complete prompt joins the decode rounds."""
        if request_id not in self._prefilling:
            raise InvariantError(f"request {request_id} is not prefilling")
        self._prefill_was_last = True
        if is_complete:
            self._prefilling = tuple(other for other in self._prefilling if other != request_id)
            self._decode_ready = (*self._decode_ready, request_id)

    def decoded(self) -> None:
        """Records one decode round."""
        self._prefill_was_last = False

    def leave(self, request_id: RequestId) -> None:
        """Frees the lane of a request that has ended."""
        if request_id in self._decode_ready:
            self._decode_ready = tuple(other for other in self._decode_ready if other != request_id)
        elif request_id in self._prefilling:
            self._prefilling = tuple(other for other in self._prefilling if other != request_id)
        elif request_id in self._ending:
            self._ending = tuple(other for other in self._ending if other != request_id)
        elif request_id == self._materializing:
            self._materializing = None
        else:
            raise InvariantError(f"request {request_id} holds no lane")
