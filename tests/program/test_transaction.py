"""The phase machine: one monotone order, cancellation and failure only between phases (X-5, X-9, TX-03)."""

from __future__ import annotations

import pytest

from ninfer_jax.errors import InvariantError
from ninfer_jax.program.transaction import Effect, Event, Phase, advance, open_transaction


def walk(transaction, stop_before: Phase | None = None):
    """Follows a transaction; returns it and the effects of each step."""
    said = []
    while transaction.is_open and transaction.phase is not stop_before:
        event = Event.ARRIVED if transaction.waits_for_copies else Event.STEP
        transaction, effects = advance(transaction, event)
        said += effects
    return transaction, said


def test_without_copies_nothing_is_ever_in_flight():  # TX-03
    done, said = walk(open_transaction("p", restores=False, copies_out=False))
    names = [Phase.HOST_RELEASES, Phase.COPY_PREPARATION, Phase.COPY_PUBLICATION, Phase.COMMITTED]
    assert list(done.trace) == names
    assert said == [Effect.RELEASE, Effect.COMMIT]


def test_every_phase_in_its_order_with_copies_and_a_restore():  # TX-12
    done, said = walk(open_transaction("p", restores=True, copies_out=True))
    assert list(done.trace) == sorted(set(done.trace))
    assert done.phase is Phase.COMMITTED
    assert said == [Effect.RELEASE, Effect.COPY_OUT, Effect.PUBLISH, Effect.RESTORE, Effect.COMMIT]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase < Phase.COMMITTED])
def test_a_cancel_is_honoured_at_the_next_boundary_of_every_phase(phase):
    transaction, before = walk(open_transaction("p", restores=True, copies_out=True), stop_before=phase)
    transaction, effects = advance(transaction, Event.CANCEL)
    assert effects == () and transaction.phase is phase
    done, said = walk(transaction)
    assert done.phase is Phase.ABORTED and said == [Effect.ABORT]
    assert Effect.COMMIT not in before


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase < Phase.COMMITTED])
def test_a_failure_aborts_from_every_phase(phase):
    transaction, _ = walk(open_transaction("p", restores=True, copies_out=True), stop_before=phase)
    done, effects = advance(transaction, Event.FAILED)
    assert done.phase is Phase.ABORTED and effects == (Effect.ABORT,)


def test_what_does_not_belong_to_a_phase_is_refused():
    transaction = open_transaction("p", restores=False, copies_out=True)
    with pytest.raises(InvariantError, match="HOST_RELEASES got ARRIVED"):
        advance(transaction, Event.ARRIVED)
    flying, _ = walk(transaction, stop_before=Phase.COPIES_IN_FLIGHT)
    with pytest.raises(InvariantError, match="COPIES_IN_FLIGHT got STEP"):
        advance(flying, Event.STEP)
    done, _ = walk(transaction)
    with pytest.raises(InvariantError, match="is over"):
        advance(done, Event.STEP)
