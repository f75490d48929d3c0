"""N-9: which sources stay beside the new branch, and which are consumed by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer_jax.context_cache.catalog import CellId
from ninfer_jax.context_cache.shortlist import Hit, find_sources
from ninfer_jax.context_cache.sources import SourceRule, source_rule
from ninfer_jax.planner import CheckpointKind, Disposition, OwnerKind
from ninfer_jax.request import CacheMarker


def prompt(n, start=0):
    return list(range(start, start + n))


def hit_of(world, facts, kind):
    (at, cell) = next(
        (i, c) for i, c in enumerate(world.state.catalog.private) if c.entry is world.entry(facts)
    )
    checkpoint = next(c for c in cell.entry.summary.checkpoints if c.ref.kind is kind)
    return Hit(CellId(OwnerKind.PRIVATE, at), cell.entry, checkpoint)


@pytest.mark.parametrize(
    ("hints", "is_protected", "vacant", "expected"),
    [
        # endpoint and rewrites            anchor
        ({"session": "s1"}, False, True, ("consume", "retain_if_fits")),
        ({"session": "s1"}, False, False, ("consume", "consume")),
        ({"session": "s2"}, False, True, ("retain", "retain")),
        ({"session": "s2"}, False, False, ("retain", "retain")),
        ({}, False, False, ("retain", "retain")),
        ({"session": "s1", "update_session_index": False}, False, False, ("retain", "retain")),
        ({"session": "s1"}, True, True, ("retain", "retain")),
        ({"session": "s1", "cache": "disabled"}, False, True, ("retain", "retain")),
    ],
)
def test_the_truth_table(worlds, hints, is_protected, vacant, expected):
    world = worlds.make_world()
    x, _ = world.turn(
        prompt(200),
        session="s1",
        closure=150,
        boundaries=[64],
        markers=[CacheMarker(1, "private_long_anchor")],
        answer=range(5),
    )
    facts = world.request(prompt(200), **hints)
    for kind, rule in (
        (CheckpointKind.SESSION_ENDPOINT, expected[0]),
        (CheckpointKind.TURN_CLOSURE, expected[0]),
        (CheckpointKind.RESPONSE_REPLAY, expected[0]),
        (CheckpointKind.LONG_ANCHOR, expected[1]),
    ):
        got = source_rule(facts, hit_of(world, x, kind), is_protected=is_protected, has_vacant_cell=vacant)
        assert got is SourceRule[rule.upper()]


def test_an_anonymous_owner_may_be_consumed_by_anyone(worlds):  # design 6
    world = worlds.make_world()
    x, _ = world.turn(prompt(100), from_messages=False)
    hit = hit_of(world, x, CheckpointKind.SESSION_ENDPOINT)
    for hints in ({}, {"session": "s"}):
        facts = world.request(prompt(200), **hints)
        assert source_rule(facts, hit, is_protected=False, has_vacant_cell=True) is SourceRule.CONSUME


def test_mv_07_three_reasons_force_retain(worlds):
    world = worlds.make_world(lanes=3)
    x, _ = world.turn(prompt(256), session="s1", from_messages=False)

    def disposition(**kwargs):
        admission = world.plan(world.request(prompt(300), **kwargs))
        assert admission.reused_tokens == 256
        return admission.chosen.disposition

    assert disposition(session="s1") is Disposition.CONSUME
    marked = {"boundaries": [256], "markers": [CacheMarker(1)]}
    assert disposition(session="s1", **marked) is Disposition.RETAIN
    assert disposition(session="s1", update_session_index=False) is Disposition.RETAIN
    assert disposition(session="s2") is Disposition.RETAIN
    elsewhere = {"boundaries": [128], "markers": [CacheMarker(1)]}
    assert disposition(session="s1", **elsewhere) is Disposition.CONSUME
    assert world.owner(x).refs  # nothing of this happened


def branching(worlds, **kwargs):
    """X: endpoint 900 behind an anchor at 300, and a request of the same session that diverges at 400."""
    world = worlds.make_world(lanes=1, **kwargs)
    x, _ = world.turn(
        prompt(880),
        session="s",
        boundaries=[300],
        markers=[CacheMarker(1, "private_long_anchor")],
        answer=range(20),
        from_messages=False,
    )
    assert [c.frontier_tokens for c in world.owner(x).checkpoints] == [300, 900]
    return world, x, world.request(prompt(400) + prompt(100, 5000), session="s", from_messages=False)


def test_anc_07_a_branch_that_fits_is_kept_beside_the_conversation(worlds):
    world, x, facts = branching(worlds, slots=2)
    admission = world.admit(facts)
    assert (admission.source_kind, admission.reused_tokens) == ("private_long_anchor", 300)
    assert admission.chosen.disposition is Disposition.RETAIN
    world.prefill(facts)
    world.finish(facts)
    assert [c.frontier_tokens for c in world.owner(x).checkpoints] == [300, 900]
    assert world.state.catalog.private[1].entry is world.entry(facts)
    world.check()


@pytest.mark.parametrize("why", ["no pages", "no private cell"])
def test_mv_04_a_branch_that_does_not_fit_rewrites_the_conversation(worlds, why):
    if why == "no private cell":
        world, x, facts = branching(worlds, slots=2, private=1)
        num_problems = 1
    else:
        world, x, facts = branching(worlds, slots=2, pages=17)
        num_problems = 2  # Retain was tried first: the program said that it does not fit as things stand
    before = world.program.num_problems
    admission = world.admit(facts)
    assert world.program.num_problems - before == num_problems
    assert (admission.source_kind, admission.reused_tokens) == ("private_long_anchor", 300)
    assert admission.chosen.disposition is Disposition.CONSUME
    record = world.state.actives[facts.request_id]
    assert [(c.ref.kind, c.frontier_tokens) for c in record.summary.checkpoints] == [
        (CheckpointKind.LONG_ANCHOR, 300)
    ]
    world.check()
    world.finish(facts)
    assert [c.frontier_tokens for c in world.owner(facts).checkpoints] == [300, 500]
    assert not any(c.entry and c.entry.order == x.publication_order for c in world.state.catalog.private)
    world.check()
    # the old branch lost its endpoint, and the next visitor is told so
    old = world.plan(world.request(prompt(880) + list(range(20)), session="s"))
    assert (old.reused_tokens, old.miss_reason) == (300, "evicted")


def test_an_owner_with_a_reader_is_never_consumed(worlds):  # D-3
    world = worlds.make_world(lanes=2)
    world.turn(prompt(128), session="s", from_messages=False)
    reader = world.request(prompt(200), session="other")
    assert world.admit(reader).chosen.disposition is Disposition.RETAIN
    own = world.request(prompt(128) + prompt(50, 4000), session="s")
    assert world.admit(own).chosen.disposition is Disposition.RETAIN
    world.check()
    world.finish(reader)
    world.finish(own)
    world.check()


def test_a_dry_run_beside_an_open_transition_takes_its_owners_for_taken(worlds):
    world = worlds.make_world(lanes=2)
    world.turn(prompt(128), session="s", from_messages=False)
    claim = world.claim(world.request(prompt(200), session="s"))
    admission = world.plan(world.request(prompt(180), session="s"))
    assert admission.choices[1].disposition is Disposition.RETAIN
    world.manager.rollback(claim)
    assert world.plan(world.request(prompt(180), session="s")).choices[1].disposition is Disposition.CONSUME


def test_hits_follow_the_checkpoint_through_republication(worlds):  # conventions 7
    world = worlds.make_world()
    world.turn(prompt(100), closure=90, answer=range(10))
    last = None
    for n in range(3):
        last, admission = world.turn(prompt(100), closure=90, answer=range(n + 1))
        assert admission.source_kind == "private_response_replay"
    entry = world.entry(last)
    hit = entry.hits[CheckpointKind.RESPONSE_REPLAY, 0]
    assert hit.num_hits == 3 and entry.recency >= hit.last_epoch > 0
    assert world.state.counters.selected == {"root": 1, "private_response_replay": 3}


def test_the_list_of_sources_is_bounded_by_depth(worlds, monkeypatch):
    monkeypatch.setattr("ninfer_jax.context_cache.shortlist.MAX_SOURCES", 4)
    world = worlds.make_world(lanes=1, private=9, slots=9)
    for n in range(7):
        world.turn(prompt(70 + n), from_messages=False, session=f"s{n}")
    facts = world.request(prompt(400))
    found = find_sources(world.state.catalog, facts, world.program)
    assert [h.checkpoint.frontier_tokens for h in found.verified] == [73, 74, 75, 76]  # in cell order
    assert world.plan(facts).reused_tokens == 76


def test_everybody_finds_the_shared_prefix_but_only_its_own_key(worlds):
    world = worlds.make_world()
    x, _ = world.turn(prompt(100), from_messages=False)
    facts = world.request(prompt(100))
    other_mode = replace(facts.identity, mode="other")
    assert len(find_sources(world.state.catalog, facts, world.program).verified) == 1
    strange = world.request(other_mode)
    assert find_sources(world.state.catalog, strange, world.program).verified == ()
    assert world.owner(x).checkpoints[0].key != strange.digests.key(100)
