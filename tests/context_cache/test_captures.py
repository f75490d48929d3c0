"""What a request captures on its way: private kinds, anchor replacement, shared prefixes that gain."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ninfer_jax import planner
from ninfer_jax.context_cache.captures import coverage_losses, private_capture, proposed_captures
from ninfer_jax.errors import InvariantError, StaleHandleError
from ninfer_jax.identity import Evidence, make_identity
from ninfer_jax.planner import CheckpointKind, CheckpointRef, OwnerKind
from ninfer_jax.planner.demand import Demand, commit_demand
from ninfer_jax.planner.plan import Aborted
from ninfer_jax.request import CacheMarker
from ninfer_jax.reuse import CheckpointSummary, PrefixKey, TransitionResult

ANCHOR, CLOSURE = CheckpointKind.LONG_ANCHOR, CheckpointKind.TURN_CLOSURE
REPLAY, SHARED = CheckpointKind.RESPONSE_REPLAY, CheckpointKind.SHARED_STABLE_PREFIX


def prompt(n, start=0):
    return list(range(start, start + n))


def anchor_marker(count):
    return CacheMarker(count, "private_long_anchor")


def frontiers(world, max_anchors=2, max_shared=4, **kwargs):
    facts = world.request(prompt(200), **kwargs)
    found = proposed_captures(facts, max_long_anchors=max_anchors, max_shared=max_shared)
    return [(c.frontier_tokens, c.kind) for c in found]


def test_proposals_in_order_and_merged(worlds):
    world = worlds.make_world()
    assert frontiers(world, closure=150) == [(150, CLOSURE), (200, REPLAY)]
    assert frontiers(world, closure=200) == [(200, CLOSURE)]
    assert frontiers(world) == [(200, REPLAY)]
    marked = {"boundaries": [64, 150], "markers": [anchor_marker(1), anchor_marker(2), CacheMarker(2)]}
    assert frontiers(world, closure=150, **marked) == [
        (64, ANCHOR),
        (150, CLOSURE),
        (150, SHARED),
        (200, REPLAY),
    ]
    assert frontiers(world, max_anchors=0, max_shared=0, closure=150, **marked) == [
        (150, CLOSURE),
        (200, REPLAY),
    ]
    assert frontiers(world, closure=150, cache="disabled", **marked) == []


def test_cand_10_a_raw_prompt_has_an_anchor_and_no_rewrite_checkpoint(worlds):  # N-7
    world = worlds.make_world()
    assert frontiers(world, anchor=199, from_messages=False) == [(199, ANCHOR)]
    assert frontiers(world, from_messages=False) == []
    world.turn(prompt(600), anchor=599, from_messages=False, answer=range(9))
    again = world.plan(world.request(prompt(600), anchor=599, from_messages=False))
    assert (again.source_kind, again.reused_tokens) == ("private_long_anchor", 599)
    longer = world.plan(world.request(prompt(600) + list(range(9)) + prompt(5), from_messages=False))
    assert longer.source_kind == "private_endpoint"  # the anchor is no part of the identity


def test_markers_that_name_no_border_capture_nothing(worlds):
    world = worlds.make_world()
    strays = [CacheMarker(7), CacheMarker(1, place="message_part"), CacheMarker(1, place="tools")]
    assert frontiers(world, boundaries=[64], markers=strays) == [(200, REPLAY)]


# ---------------------------------------------------------------- anchors


def summaries(*anchors):
    return [
        CheckpointSummary(CheckpointRef(0, 1, ANCHOR, n), n, f, PrefixKey(1, 1, f, "text"))
        for n, f in enumerate(anchors, 1)
    ]


def replaced(anchors, new, limit):
    got = private_capture(summaries(*anchors), new, ANCHOR, max_long_anchors=limit)
    return None if got is None else (got.ordinal, got.replaces and anchors[got.replaces.ordinal - 1])


def test_anc_05_the_least_coverage_loss_goes():
    assert coverage_losses([100, 5000, 9000]) == [490000, 19600000, 16000000]
    assert replaced([100, 5000], 9000, 2) == (1, 100)
    assert replaced([1000, 5000, 5200, 9000], 12000, 4) == (3, 5200)  # conventions 9
    assert replaced([100], 5000, 2) == (2, None)
    assert replaced([], 5000, 0) is None
    assert replaced([5000], 5000, 2) is None  # there already
    assert replaced([5000, 5010], 5005, 2) is None  # the new one itself is worth least
    assert replaced([100, 200], 300, 2) == (1, 100)  # 100*100, 100*100, 100*100: the shallower goes


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6, unique=True), st.integers(1, 10_000))
def test_replacement_keeps_the_set_that_covers_best(anchors, new):
    anchors = sorted(anchors)
    got = private_capture(summaries(*anchors), new, ANCHOR, max_long_anchors=len(anchors))
    if new in anchors:
        assert got is None
        return
    everything = sorted([*anchors, new])

    def loss(f):  # what nobody nearer can cover: the plain definition, again
        lower = max([x for x in everything if x < f], default=0)
        upper = min([x for x in everything if x > f], default=f + (f - lower))
        return (f - lower) * (upper - f)

    victim = min(everything, key=lambda f: (loss(f), f))
    expected = None if victim == new else victim
    assert (None if got is None else anchors[got.replaces.ordinal - 1]) == expected


def test_anchors_of_a_conversation_stay_bounded(worlds):
    world = worlds.make_world(anchors=2)
    markers = [anchor_marker(n) for n in (1, 2, 3, 4)]
    facts, _ = world.turn(prompt(400), boundaries=[64, 128, 130, 300], markers=markers)
    kept = [c.frontier_tokens for c in world.owner(facts).checkpoints if c.ref.kind is ANCHOR]
    assert kept == [128, 300]  # {64, 128}; 130 covers nothing that 128 does not; 300 for 64
    world.check()


def test_a_rewrite_checkpoint_takes_the_place_of_the_older_one(worlds):
    world = worlds.make_world()
    world.turn(prompt(100), closure=90, session="s", answer=range(10))
    tokens = prompt(100) + list(range(10)) + prompt(50, 700)
    longer = make_identity(tokens, rewrite_execution_frontiers=[90, 150])
    facts, admission = world.turn(longer, closure=150, session="s", answer=range(3))
    assert admission.reused_tokens == 110
    kinds = [(c.ref.kind, c.frontier_tokens) for c in world.owner(facts).checkpoints]
    assert kinds == [(CLOSURE, 150), (REPLAY, 160), (CheckpointKind.SESSION_ENDPOINT, 163)]
    world.check()


def test_a_capture_without_room_is_a_skip(worlds):  # Y-6, A-6
    world = worlds.make_world(lanes=1, slots=0, host_slots=0, host_granules=0)
    facts, _ = world.turn(prompt(100), closure=50, answer=range(4))
    assert [c.frontier_tokens for c in world.owner(facts).checkpoints] == [104]
    assert world.state.counters.captures_aborted == 2
    world.check()


# ---------------------------------------------------------------- shared


def shared_entries(world):
    return [c.entry for c in world.state.catalog.shared if c.entry is not None]


def publish(world, start=0, length=128, evidence=Evidence.EXPLICIT_BOUNDARY, **kwargs):
    """One request whose first message ends at `length`."""
    return world.turn(
        prompt(length, start) + prompt(20, 50_000 + start + 31 * world.next_id),
        boundaries=[length],
        markers=[CacheMarker(1, evidence=evidence)],
        from_messages=False,
        **kwargs,
    )


def test_cand_11_a_declared_prefix_is_published_at_first_sight(worlds):
    world = worlds.make_world()
    publish(world)
    (entry,) = shared_entries(world)
    assert [c.frontier_tokens for c in entry.summary.checkpoints] == [128]
    assert entry.evidence is Evidence.EXPLICIT_BOUNDARY
    (credit,) = world.state.portfolio.credits
    assert credit.owner == entry.summary.owner
    world.check()
    _, admission = publish(world)  # somebody else with the same prefix
    assert admission.source_kind == "shared_stable_prefix"
    assert admission.captures == ()  # the very prefix is shared already (E-5)
    assert world.state.portfolio.credits == ()  # VAL-05
    assert len(shared_entries(world)) == 1
    world.check()


def test_a_credit_goes_with_its_owner(worlds):
    world = worlds.make_world()
    publish(world)
    (entry,) = shared_entries(world)
    intent = world.manager.release_intent(entry.summary.owner_key)
    world.manager.adopt_release(intent, world.program.release(entry.summary.owner))
    assert world.state.portfolio.credits == ()  # the row's next owner must not inherit it
    world.check()


def test_cand_12_a_default_marker_waits_for_a_second_domain(worlds):  # E-1, CAND-15
    world = worlds.make_world()
    default = Evidence.DEFAULT_AUTOMATIC
    publish(world, evidence=default, session="one")
    publish(world, evidence=default, session="one")
    assert shared_entries(world) == []
    publish(world, evidence=default, session="two")
    assert len(shared_entries(world)) == 1
    assert world.state.portfolio.credits == ()  # no declared credit


def test_ses_06_without_cells_nothing_is_shared(worlds):
    world = worlds.make_world(shared=0)
    facts, admission = publish(world)
    assert admission.captures == () and shared_entries(world) == []
    assert world.owner(facts).checkpoints
    world.check()


def test_dedup_at_the_frontier(worlds):
    """Two requests with one marker run side by side: the second finds the prefix shared already."""
    world = worlds.make_world()
    requests = [
        world.request(
            prompt(128) + prompt(20, 900 * n), boundaries=[128], markers=[CacheMarker(1)], from_messages=False
        )
        for n in (1, 2)
    ]
    for facts in requests:
        assert [c.kind for c in world.admit(facts).captures] == [SHARED]
    assert len(world.prefill(requests[0])) == 1
    record = world.state.actives[requests[1].request_id]
    world.program.advance(record.handle, 128)
    plan = world.manager.capture_intent(requests[1].request_id, 128)
    assert plan.is_skip and plan.skipped == "the very prefix is shared already"
    world.manager.skip_captures(requests[1].request_id, 128)
    assert world.manager.capture_frontiers(requests[1].request_id) == ()
    for facts in requests:
        world.finish(facts)
    world.check()


def test_an_open_transition_skips_the_offer(worlds):  # TX-09
    world = worlds.make_world()
    facts = world.request(prompt(100), closure=50)
    world.admit(facts)
    claim = world.claim(world.request(prompt(60, 9000)))
    world.program.advance(world.state.actives[facts.request_id].handle, 50)
    plan = world.manager.capture_intent(facts.request_id, 50)
    assert plan.is_skip and plan.skipped == "a transition is open"
    world.manager.rollback(claim)
    assert world.manager.capture_intent(facts.request_id, 50).private is not None


def test_the_private_part_comes_first_and_the_shared_one_after_it(worlds):  # E-7, CAP-04
    world = worlds.make_world()
    facts = world.request(prompt(200), closure=128, boundaries=[128], markers=[CacheMarker(1)])
    admission = world.admit(facts)
    assert [c.kind for c in admission.captures] == [CLOSURE, SHARED, REPLAY]
    assert admission.work.capture_frontiers == (128, 200)
    parts = [(p.frontier_tokens, p.private is not None, p.shared is not None) for p in world.prefill(facts)]
    assert parts == [(128, True, False), (128, False, True), (200, True, False)]
    world.finish(facts)
    world.check()


def full_shared_catalog(worlds, num_records):
    """S=1, taken by T at 128 tokens whose credit is spent; `num_records` demands name it."""
    world = worlds.make_world(shared=1, lanes=1)
    publish(world)
    (entry,) = shared_entries(world)
    key = entry.summary.checkpoints[0].key
    portfolio = replace(world.state.portfolio, demands=(), credits=())
    for n in range(num_records):
        portfolio = commit_demand(portfolio, Demand(b"%d" % n, frozenset([key])))
    world.manager._state = replace(world.state, portfolio=portfolio)
    return world, entry


@pytest.mark.parametrize(("length", "is_replaced"), [(128 * 2, True), (64, False)])
def test_cap_06_a_full_catalog_replaces_only_for_a_strict_gain(worlds, length, is_replaced):
    world, old = full_shared_catalog(worlds, num_records=2)
    facts, _ = publish(world, start=7000, length=length)
    (now,) = shared_entries(world)
    assert (now.order == facts.publication_order) is is_replaced
    if is_replaced:
        assert now.summary.owner_key != old.summary.owner_key
        assert world.state.counters.owners_evicted == 1
        assert [c.owner for c in world.state.portfolio.credits] == [now.summary.owner]
        assert world.state.catalog.shared[0].generation == 2
    world.check()


def test_cap_03_an_entry_with_a_reader_is_never_replaced(worlds):
    world, old = full_shared_catalog(worlds, num_records=0)
    private = next(c.entry for c in world.state.catalog.private if c.entry)
    intent = world.manager.release_intent(private.summary.owner_key)
    world.manager.adopt_release(intent, world.program.release(private.summary.owner))
    # the reader itself wants a deeper prefix in the only cell
    facts = world.request(
        prompt(128) + prompt(200, 800), boundaries=[300], markers=[CacheMarker(1)], from_messages=False
    )
    assert world.admit(facts).source_kind == "shared_stable_prefix"
    assert world.prefill(facts) == []
    assert shared_entries(world)[0].summary == old.summary
    world.finish(facts)
    world.check()


def test_cap_02_a_victim_may_go_although_a_cell_is_vacant(worlds):
    world = worlds.make_world(lanes=1, slots=1, host_slots=0, host_granules=0)
    idle, _ = world.turn(prompt(20, 90_000), from_messages=False)  # takes the one extra state slot
    publish(world, length=640)
    assert len(shared_entries(world)) == 1
    assert not any(c.entry and c.entry.order == idle.publication_order for c in world.state.catalog.private)
    world.check()


def test_blocked_requests_raise_the_price(worlds):  # O-10
    world = worlds.make_world(lanes=1, slots=1, model=worlds.UNIT)
    world.turn(prompt(64, 90_000), from_messages=False)
    facts = world.request(prompt(700), boundaries=[640], markers=[CacheMarker(1)], from_messages=False)
    world.admit(facts)
    world.program.advance(world.state.actives[facts.request_id].handle, 640)
    alone = world.manager.capture_intent(facts.request_id, 640)
    crowded = world.manager.capture_intent(facts.request_id, 640, runnable_requests=3)
    assert alone.shared is not None
    assert crowded.shared is None or crowded.shared.gain_ns <= alone.shared.gain_ns
    hopeless = world.manager.capture_intent(facts.request_id, 640, runnable_requests=10**6)
    moved = int(planner.used(world.program.state)[0]) == 2  # no free slot: somebody must be copied or go
    assert moved and (hopeless.shared is None or hopeless.shared.plan.victims)


def test_a_stale_capture_plan_is_refused_and_a_wrong_result_too(worlds):
    world = worlds.make_world()
    facts = world.request(prompt(200), closure=128)
    world.admit(facts)
    record = world.state.actives[facts.request_id]
    world.program.advance(record.handle, 128)
    old = world.manager.capture_intent(facts.request_id, 128)
    world.admit(world.request(prompt(10, 5000)))
    with pytest.raises(StaleHandleError):
        world.manager.claim_capture(old)
    plan = world.manager.capture_intent(facts.request_id, 128)
    claim = world.manager.claim_capture(plan)
    result = world.program.capture(record.handle, plan)
    state = world.state
    with pytest.raises(InvariantError, match="lineage"):
        world.manager.adopt_capture(claim, replace(result, owners=(record.summary,)))
    with pytest.raises(InvariantError, match="summary of its active"):
        world.manager.adopt_capture(claim, replace(result, owners=()))
    assert world.state is state
    world.manager.adopt_capture(claim, result)
    world.check()


def test_an_aborted_shared_capture_loses_no_cell_and_is_not_tried_again(worlds):
    world = worlds.make_world()
    facts = world.request(prompt(150), boundaries=[128], markers=[CacheMarker(1)], from_messages=False)
    world.admit(facts)
    world.program.advance(world.state.actives[facts.request_id].handle, 128)
    plan = world.manager.capture_intent(facts.request_id, 128)
    claim = world.manager.claim_capture(plan)
    assert world.state.catalog.shared[0].reserved_by == facts.request_id
    outcome = Aborted(plan.shared.plan.plan_id, world.program.resource_revision, "cancelled")
    world.manager.adopt_capture(claim, TransitionResult(outcome, None, ()))
    assert all(c.is_vacant for c in world.state.catalog.shared)
    assert world.manager.capture_frontiers(facts.request_id) == ()
    assert world.state.counters.captures_aborted == 1
    world.check()


def test_the_planner_sees_the_window_as_it_will_be(worlds):  # design 6: provisional record
    world = worlds.make_world()
    admission = world.plan(
        world.request(prompt(150), boundaries=[128], markers=[CacheMarker(1)], from_messages=False)
    )
    assert admission.facts.matches.shape[1] == 1 and world.state.portfolio.demands == ()
    assert admission.demand.creatable and not admission.demand.matched
    assert np.all(admission.facts.weights >= 0) and OwnerKind.SHARED
