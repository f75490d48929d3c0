"""SessionIndex and its life in the manager: only a larger publication order binds (Y-3, Y-4)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer_jax.context_cache.sessions import (
    MAX_UNBOUND,
    SessionIndex,
    bind,
    claim_binding,
    restore_binding,
    unbind,
    without_owners,
)
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner import Disposition, Retention
from ninfer_jax.reuse import OwnerKey


def prompt(n, start=0):
    return list(range(start, start + n))


def test_ses_01_a_larger_order_replaces(worlds):
    world = worlds.make_world()
    x, _ = world.turn(prompt(100), session="s", retention="live_session")
    y, _ = world.turn(prompt(100, 5000), session="s")
    assert world.state.sessions.bound("s") == world.owner(y).owner_key
    assert world.entry(y).session == "s" and world.entry(y).retention is Retention.LIVE_SESSION
    assert world.entry(x).session is None and world.entry(x).retention is Retention.RECENT_PRIVATE
    world.check()
    assert world.plan(world.request(prompt(100))).reused_tokens > 0  # anonymous, and still of use


def test_ses_02_an_older_late_finisher_stays_anonymous(worlds):  # Y-4
    world = worlds.make_world()
    older, newer = world.request(prompt(80), session="s"), world.request(prompt(80, 3000), session="s")
    for facts in (older, newer):
        world.admit(facts)
        world.prefill(facts)
    world.finish(newer)
    world.finish(older)
    assert world.state.sessions.bound("s") == world.owner(newer).owner_key
    assert world.entry(older).session is None
    assert world.entry(older).retention is Retention.RECENT_PRIVATE
    world.check()


def test_ses_03_an_abort_restores_only_its_own_claim(worlds):
    for is_replaced in (False, True):
        world = worlds.make_world(lanes=3)
        x, _ = world.turn(prompt(100), session="s")
        seventh = world.request(prompt(50, 8000), session="s")
        world.admit(seventh)
        world.next_id -= 2  # an older request of the session comes to its turn only now
        sixth = replace(world.request(prompt(150), session="s"), request_id=99)
        claim = world.claim(replace(sixth, publication_order=0.5))
        world.next_id += 1
        assert claim.consumes and claim.consumed_session == "s"
        assert world.state.sessions.bound("s") is None
        if is_replaced:
            world.finish(seventh)
        world.manager.adopt_materialization(claim, world.program.abort(claim.admission))
        bound = world.owner(seventh) if is_replaced else world.owner(x)
        assert world.state.sessions.bound("s") == bound.owner_key
        assert (world.entry(x).session is None) is is_replaced
        world.check()


def test_ses_04_a_key_proves_nothing(worlds):
    world = worlds.make_world()
    x, _ = world.turn(prompt(100), session="s")
    facts = world.request(prompt(100, 7000), session="s")
    admission = world.admit(facts)
    assert (admission.source_kind, admission.miss_reason) == ("root", "no_match")
    assert world.state.sessions.bound("s") == world.owner(x).owner_key


def test_ses_07_a_request_that_does_not_update_the_index(worlds):
    world = worlds.make_world()
    x, _ = world.turn(prompt(100), session="s", from_messages=False)
    facts = world.request(prompt(150), session="s", update_session_index=False, from_messages=False)
    admission = world.admit(facts)
    assert admission.reused_tokens == 100
    assert admission.chosen.disposition is Disposition.RETAIN and admission.chosen.is_session_binding
    world.finish(facts)
    assert world.state.sessions.bound("s") == world.owner(x).owner_key
    assert world.entry(facts).session is None
    assert world.entry(facts).retention is Retention.RECENT_PRIVATE
    world.check()


def test_a_disposable_answer_stays_disposable(worlds):
    world = worlds.make_world()
    x, _ = world.turn(prompt(100), session="s", retention="disposable")
    assert world.entry(x).retention is Retention.DISPOSABLE
    world.turn(prompt(100, 4000), session="s")
    assert world.entry(x).retention is Retention.DISPOSABLE  # losing the binding makes nothing dearer


def test_the_consumed_owner_of_a_session_bars_older_requests(worlds):
    world = worlds.make_world(lanes=2)
    old = world.request(prompt(60, 9000), session="s")
    world.turn(prompt(100), session="s", from_messages=False)
    facts = world.request(prompt(150), session="s")
    assert world.admit(facts).chosen.disposition is Disposition.CONSUME
    assert world.state.sessions.bound("s") is None
    world.admit(old)
    world.finish(old)
    assert world.state.sessions.bound("s") is None and world.entry(old).session is None
    world.finish(facts)
    assert world.state.sessions.bound("s") == world.owner(facts).owner_key
    world.check()


X, Y = OwnerKey(1, 1), OwnerKey(2, 1)


def test_two_owners_of_one_order_are_a_broken_invariant():
    index = bind(SessionIndex(), "s", 5, X).sessions
    assert bind(index, "s", 5, X).is_bound is False
    with pytest.raises(InvariantError, match="order 5"):
        bind(index, "s", 5, Y)


def test_a_claim_that_is_not_held_restores_nothing():
    index = claim_binding(bind(SessionIndex(), "s", 5, X).sessions, "s", 7)
    assert restore_binding(index, "s", 8) is index
    assert restore_binding(index, "t", 7) is index
    assert restore_binding(index, "s", 7).bound("s") == X
    assert unbind(index, "s", Y) is index


def test_orders_without_owners_are_bounded():
    index = SessionIndex()
    for n in range(MAX_UNBOUND + 50):
        index = unbind(bind(index, f"s{n}", n, X).sessions, f"s{n}", X)
    assert len(index.bindings) == MAX_UNBOUND and "s0" not in index.bindings
    live = bind(index, "live", 10_000, X).sessions
    gone = without_owners(live)
    assert gone.bound("live") is None and gone.bindings["live"].order == 10_000
