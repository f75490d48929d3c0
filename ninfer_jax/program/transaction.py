"""Owns the phase machine of the one global transition: which step comes next, as a value (X-1, X-5, X-9).

It does nothing: `advance` answers an event with the next transaction and the effects to carry out, and
`resources` carries them out. Materialisation and capture share the one order; a phase without work passes
without a stop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from ninfer_jax.errors import InvariantError


class Phase(IntEnum):
    """Where a transaction stands; it only ever grows."""

    HOST_RELEASES = 0
    COPY_PREPARATION = 1
    COPIES_IN_FLIGHT = 2  # only with copies to Host
    COPY_PUBLICATION = 3
    RESTORE = 4  # materialisation only: the source and the sequence's own copies
    COMMITTED = 5
    ABORTED = 6


class Event(Enum):
    """What may happen to a transaction at a stable boundary."""

    STEP = "go on"
    ARRIVED = "every copy to Host has arrived"
    CANCEL = "the request is no longer wanted"
    FAILED = "an effect failed; nothing of it was published"


class Effect(Enum):
    """What has to be done next, in this order. One that fails has published nothing."""

    RELEASE = "publish evictions, dropped checkpoints and dropped replicas"
    COPY_OUT = "take the Host destinations and start the copies to Host"
    PUBLISH = "publish the Host replicas and free the Device replicas they replace"
    RESTORE = "bring the source to Device"
    COMMIT = "publish the new sequence or checkpoint"
    ABORT = "give back what was taken and not published; what was published stays"


@dataclass(frozen=True)
class Transaction:
    """The running transition. Build with `open_transaction`."""

    plan_id: str
    restores: bool  # whether it has a Restore phase
    copies_out: bool
    phase: Phase = Phase.HOST_RELEASES
    is_cancelled: bool = False
    trace: tuple[Phase, ...] = (Phase.HOST_RELEASES,)

    @property
    def is_open(self) -> bool:
        """Whether there is still something to do."""
        return self.phase < Phase.COMMITTED

    @property
    def waits_for_copies(self) -> bool:
        """Whether only `ARRIVED` (or a failure) leads on."""
        return self.phase is Phase.COPIES_IN_FLIGHT


def open_transaction(plan_id: str, *, restores: bool, copies_out: bool) -> Transaction:
    """Returns a transaction before its first effect."""
    return Transaction(plan_id, restores, copies_out)


def advance(transaction: Transaction, event: Event) -> tuple[Transaction, tuple[Effect, ...]]:
    """Returns the transaction after an event, and what to do for it.

    ==================  ==============================================  ===================
    phase               go on                                           cancelled, or failed
    ==================  ==============================================  ===================
    HOST_RELEASES       RELEASE                                         ABORT
    COPY_PREPARATION    COPY_OUT, if there are copies                   ABORT
    COPIES_IN_FLIGHT    nothing: the copies have ARRIVED                ABORT
    COPY_PUBLICATION    PUBLISH, if there are copies; capture: COMMIT   ABORT
    RESTORE             RESTORE, COMMIT                                 ABORT
    ==================  ==============================================  ===================

    The caller keeps the transaction it had when an effect fails, and tells it FAILED.
    A cancelled transaction is looked at only here, at a stable boundary; copies in flight land first.

    Raises:
        InvariantError: if the transaction is over, or an event does not belong to its phase.
    """
    phase = transaction.phase
    if not transaction.is_open:
        raise InvariantError(f"transaction {transaction.plan_id} is over ({phase.name}), got {event.name}")
    if event is Event.CANCEL:
        return replace(transaction, is_cancelled=True), ()
    if event is not Event.FAILED and (event is Event.ARRIVED) != transaction.waits_for_copies:
        raise InvariantError(f"transaction {transaction.plan_id} in {phase.name} got {event.name}")
    if event is Event.FAILED or transaction.is_cancelled:
        return _moved(transaction, Phase.ABORTED), (Effect.ABORT,)
    if phase is Phase.HOST_RELEASES:
        return _moved(transaction, Phase.COPY_PREPARATION), (Effect.RELEASE,)
    if phase is Phase.COPY_PREPARATION:
        if transaction.copies_out:
            return _moved(transaction, Phase.COPIES_IN_FLIGHT), (Effect.COPY_OUT,)
        return _moved(transaction, Phase.COPY_PUBLICATION), ()
    if phase is Phase.COPIES_IN_FLIGHT:
        return _moved(transaction, Phase.COPY_PUBLICATION), ()
    if phase is Phase.COPY_PUBLICATION:
        effects = (Effect.PUBLISH,) if transaction.copies_out else ()
        if transaction.restores:
            return _moved(transaction, Phase.RESTORE), effects
        return _moved(transaction, Phase.COMMITTED), (*effects, Effect.COMMIT)
    return _moved(transaction, Phase.COMMITTED), (Effect.RESTORE, Effect.COMMIT)


def _moved(transaction: Transaction, phase: Phase) -> Transaction:
    return replace(transaction, phase=phase, trace=(*transaction.trace, phase))
