"""Planning, claiming and adopting one admission after another: sources, edges, cells, results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ninfer_jax import planner
from ninfer_jax.errors import ContractError, InvariantError, StaleHandleError
from ninfer_jax.identity import MediaSpan, TokenType, make_identity
from ninfer_jax.planner import CheckpointKind, Disposition
from ninfer_jax.planner.plan import Aborted, Readiness
from ninfer_jax.request import CacheMarker
from ninfer_jax.reuse import OwnerKey, TransitionResult


def prompt(n, start=0):
    return list(range(start, start + n))


def test_a_conversation_goes_on_from_its_own_endpoint(worlds):  # MV-01, E2E-02, CAND-01, CAND-02
    world = worlds.make_world()
    first, cold = world.turn(prompt(100), session="ana", closure=90, answer=range(500, 510))
    assert (cold.source_kind, cold.reused_tokens, cold.miss_reason) == ("root", 0, "no_match")
    assert cold.choices == (cold.choices[0],) and cold.choices[0].ref is None
    world.check()
    kinds = [(c.ref.kind, c.frontier_tokens) for c in world.owner(first).checkpoints]
    assert kinds == [
        (CheckpointKind.TURN_CLOSURE, 90),
        (CheckpointKind.RESPONSE_REPLAY, 100),
        (CheckpointKind.SESSION_ENDPOINT, 110),
    ]
    longer = make_identity(
        prompt(100) + list(range(500, 510)) + prompt(40, 900), rewrite_execution_frontiers=[90, 140]
    )
    second = world.request(longer, session="ana", closure=140)
    warm = world.plan(second)
    assert [c.ref.kind for c in warm.choices[1:]] == [
        CheckpointKind.SESSION_ENDPOINT,
        CheckpointKind.TURN_CLOSURE,
        CheckpointKind.RESPONSE_REPLAY,
    ]
    assert all(c.is_session_binding for c in warm.choices[1:])
    assert (warm.source_kind, warm.reused_tokens, warm.miss_reason) == ("private_endpoint", 110, None)
    assert warm.chosen.disposition is Disposition.CONSUME
    assert [c.frontier_tokens for c in warm.captures] == [140, 150]
    before = world.state.catalog.private[0].generation
    world.admit(second)
    assert world.state.actives[second.request_id].cell.cell_idx == 0  # the source's own cell (Y-5)
    assert world.state.catalog.private[0].entry is None
    world.check()
    world.prefill(second)
    world.finish(second, range(5))
    world.check()
    assert world.state.catalog.private[0].generation == before + 1
    assert world.state.sessions.bound("ana") == world.owner(second).owner_key


def test_an_identical_prompt_reuses_every_token(worlds):  # issue item 3: regenerate
    world = worlds.make_world()
    world.turn(prompt(100), closure=90, answer=range(500, 510))
    again = world.request(prompt(100), closure=90)
    admission = world.plan(again)
    assert (admission.source_kind, admission.reused_tokens) == ("private_response_replay", 100)
    assert admission.captures == ()
    world.admit(again)
    kept = {c.ref.kind for c in world.state.actives[again.request_id].summary.checkpoints}
    assert kept == {CheckpointKind.TURN_CLOSURE, CheckpointKind.RESPONSE_REPLAY}
    world.finish(again, range(3))
    world.check()


def test_an_edited_answer_reuses_the_turn_closure(worlds):  # ID-09
    world = worlds.make_world()
    world.turn(prompt(260), closure=250, output=100, answer=range(500, 590))
    edited = make_identity(prompt(260)[:255] + prompt(60, 3000), rewrite_execution_frontiers=[250, 300])
    admission = world.plan(world.request(edited, closure=300))
    assert (admission.source_kind, admission.reused_tokens) == ("private_turn_closure", 250)


def test_id_01_equal_token_ids_are_not_enough(worlds):
    world = worlds.make_world()
    world.turn(prompt(190), closure=140, answer=range(10))
    tokens = prompt(190) + list(range(10))
    base = make_identity(tokens, rewrite_execution_frontiers=[140])
    types = base.token_types.copy()
    types[150] = TokenType.IMAGE
    positions = base.positions.copy()
    positions[1, 150] += 1
    for other in (replace(base, token_types=types), replace(base, positions=positions)):
        assert world.plan(world.request(other)).reused_tokens == 140
    assert world.plan(world.request(base)).reused_tokens == 200


def test_id_02_the_media_digest_is_part_of_the_identity(worlds):
    world = worlds.make_world()

    def picture(digest, tokens=200):
        return replace(
            make_identity(prompt(tokens), rewrite_execution_frontiers=[30]),
            media=(MediaSpan(40, 60, TokenType.IMAGE, digest),),
        )

    world.turn(picture(b"cat"), closure=30)
    assert world.plan(world.request(picture(b"cat", 210))).reused_tokens == 200
    assert world.plan(world.request(picture(b"dog", 210))).reused_tokens == 30


@pytest.mark.parametrize("frontier", [60, 124, 100])
def test_id_11_no_capture_cuts_an_image(worlds, frontier):
    world = worlds.make_world()
    identity = replace(make_identity(prompt(200)), media=(MediaSpan(60, 124, TokenType.IMAGE, b"x"),))
    markers = [CacheMarker(1, "private_long_anchor")]
    admission = world.plan(world.request(identity, boundaries=[frontier], markers=markers))
    anchors = [c.frontier_tokens for c in admission.captures if c.kind is CheckpointKind.LONG_ANCHOR]
    assert anchors == ([] if frontier == 100 else [frontier])


def test_id_04_a_shortlist_collision_proves_nothing(worlds):  # OBS-02
    def colliding(identity):
        digests = worlds.make_digests(identity)
        return replace(digests, sums=np.zeros_like(digests.sums))

    world = worlds.make_world(digests=colliding)
    world.turn(prompt(118), answer=range(10), from_messages=False)
    admission = world.plan(world.request(prompt(128, 7000)))
    assert [hit.checkpoint.frontier_tokens for hit in admission.shortlist.refused] == [128]
    assert (admission.source_kind, admission.reused_tokens) == ("root", 0)
    assert admission.miss_reason == "identity_mismatch"
    assert len(admission.choices) == 1


def test_id_05_a_dropped_image_is_no_partial_hit(worlds):
    world = worlds.make_world()
    first, _ = world.turn(prompt(100), closure=90, answer=range(500, 510))
    entry = world.entry(first)
    replay = next(c for c in entry.summary.checkpoints if c.ref.kind is CheckpointKind.RESPONSE_REPLAY)
    # a victim of some plan lost its replay checkpoint; its owner and all of its pages are still there
    facts = world.request(prompt(40, 9000), output=1)
    claim = world.claim(facts)
    drop = planner.plan.VictimClaim(entry.summary.owner, entry.summary.generation, False, (replay.ref,))
    forged = replace(claim, victims=(drop,))
    world.manager._state = replace(world.state, open_claim=forged)
    result = world.program.commit(claim.admission)
    world.program.state = planner.drop_checkpoint(world.program.state, replay.row)
    outcome = replace(result.outcome, deleted=(replay.ref,))
    rows = (*result.owners, world.program.summary(entry.summary.owner))
    world.manager.adopt_materialization(forged, replace(result, outcome=outcome, owners=rows))
    world.check()
    again = world.plan(world.request(prompt(100), closure=90))
    assert (again.reused_tokens, again.miss_reason) == (90, "no_state")


def test_id_07_a_host_only_checkpoint_is_valid_and_needs_a_transfer(worlds):
    world = worlds.make_world()
    first, _ = world.turn(prompt(128), from_messages=False)
    owner = world.owner(first).owner
    world.program.state = planner.demote(world.program.state, owner)
    admission = world.plan(world.request(prompt(200), session=None))
    assert admission.reused_tokens == 128
    assert admission.readiness is Readiness.NEEDS_TRANSFER


def test_rev_06_a_reused_row_rejects_the_old_handle(worlds):
    world = worlds.make_world()
    first, _ = world.turn(prompt(64), from_messages=False)
    old = world.owner(first)
    intent = world.manager.release_intent(old.owner_key)
    world.manager.adopt_release(intent, world.program.release(old.owner))
    second, _ = world.turn(prompt(64, 5000), from_messages=False)
    assert world.owner(second).owner == old.owner  # the same row, another generation
    with pytest.raises(StaleHandleError, match="is gone"):
        world.manager.release_intent(old.owner_key)
    assert not world.program.verify(old.checkpoints[0].ref, first.identity)
    world.check()
    assert world.plan(world.request(prompt(64))).miss_reason == "evicted"


def test_mv_05_a_shared_source_is_forked_and_kept_until_both_readers_end(worlds):
    world = worlds.make_world()
    marker = [CacheMarker(1)]
    tokens = prompt(128)
    world.turn(tokens + prompt(30, 300), boundaries=[128], markers=marker, from_messages=False)
    (shared,) = [c.entry.summary for c in world.state.catalog.shared if c.entry is not None]
    world.manager.adopt_release(
        world.manager.release_intent(OwnerKey(*_only_private(world))),
        world.program.release(_only_private(world)[0]),
    )
    readers = []
    for start in (1000, 2000):
        facts = world.request(tokens + prompt(50, start))
        admission = world.admit(facts)
        assert admission.source_kind == "shared_stable_prefix"
        assert admission.chosen.disposition is Disposition.RETAIN
        readers.append(facts)
    assert {e.owner for e in world.state.edges} == {shared.owner_key}
    assert len(world.state.edges) == 2
    world.check()
    for facts in readers:
        with pytest.raises(ContractError, match="in use"):
            world.manager.release_intent(shared.owner_key)
        world.prefill(facts)
        world.finish(facts)
    assert world.state.edges == frozenset()
    world.manager.release_intent(shared.owner_key)
    world.check()


def _only_private(world):
    (entry,) = [c.entry for c in world.state.catalog.private if c.entry is not None]
    return entry.summary.owner_key


def test_mode_01_disabled_ignores_a_perfect_hit(worlds):  # C-10
    world = worlds.make_world()
    first, _ = world.turn(prompt(100), session="ana", closure=90)
    before = world.state
    facts = world.request(prompt(100), session="ana", closure=90, cache="disabled")
    admission = world.plan(facts)
    assert len(admission.choices) == 1 and admission.reused_tokens == 0
    assert (admission.miss_reason, admission.captures, admission.demand) == ("disabled", (), None)
    world.admit(facts)
    world.prefill(facts)
    assert not world.manager.finish_intent(facts.request_id).publish
    world.finish(facts)
    world.check()
    assert world.state.portfolio is before.portfolio
    assert world.state.sessions.bound("ana") == world.owner(first).owner_key
    assert world.state.catalog.private == before.catalog.private


def test_mode_03_disabled_gets_the_full_guarantee(worlds):
    world = worlds.make_world(lanes=1, pages=8, host_slots=0, host_granules=0)
    first, _ = world.turn(prompt(64 * 4), from_messages=False, output=10)
    facts = world.request(prompt(64 * 7, 9000), cache="disabled", output=10)
    admission = world.admit(facts)
    assert [v.owner for v in admission.plan.victims if v.evicted] == [world.program_owner(first)]
    assert not world.state.catalog.private[0].entry
    world.check()


def test_a_plan_and_a_rollback_leave_no_trace(worlds):  # X-3, and what `engine.plan` relies on
    world = worlds.make_world()
    world.turn(prompt(100), session="ana", closure=90)
    state, physical = world.state, world.program.state
    longer = make_identity(prompt(120), rewrite_execution_frontiers=[90, 110])
    facts = world.request(longer, session="ana", closure=110)
    first = world.plan(facts)
    assert world.state is state and world.program.state is physical
    assert world.plan(facts).plan.plan_id == first.plan.plan_id
    claim = world.manager.claim(first)
    assert world.state.sessions.bound("ana") is None  # set aside while it is being consumed
    world.manager.rollback(claim)
    assert world.state.catalog == state.catalog
    assert world.state.sessions == state.sessions
    assert world.state.portfolio is state.portfolio and world.state.counters is state.counters
    with pytest.raises(ContractError, match="not open"):
        world.manager.rollback(claim)


def test_a_claim_of_an_old_plan_is_refused(worlds):
    world = worlds.make_world()
    admission = world.plan(world.request(prompt(50)))
    world.turn(prompt(70))
    with pytest.raises(StaleHandleError, match="plan it again"):
        world.manager.claim(admission)
    fresh = world.plan(world.request(prompt(50)))
    world.manager.claim(fresh)
    with pytest.raises(ContractError, match="X-6"):
        world.manager.claim(fresh)


def test_an_aborted_materialisation_leaves_no_demand_and_no_hit(worlds):  # VAL-16, X-9
    world = worlds.make_world()
    first, _ = world.turn(prompt(100), session="ana", closure=90)
    before = world.state
    claim = world.claim(world.request(prompt(150), session="ana"))
    world.manager.adopt_materialization(claim, world.program.abort(claim.admission))
    assert world.state.portfolio is before.portfolio
    assert world.state.catalog == before.catalog
    assert world.state.sessions.bound("ana") == world.owner(first).owner_key
    assert world.state.counters.materializations_aborted == 1
    world.check()


def crowded(worlds, **kwargs):
    """Three private owners and a request that needs room from all of them."""
    world = worlds.make_world(lanes=1, pages=12, host_slots=0, host_granules=0, slots=4, **kwargs)
    for start in (1000, 2000, 3000):
        world.turn(prompt(64 * 3, start), closure=64, output=1)
    return world, world.claim(world.request(prompt(64 * 10, 9000), output=10))


def test_tx_08_rows_are_matched_by_owner_and_never_twice(worlds):
    world, claim = crowded(worlds)
    assert len(claim.victims) >= 2
    result = world.program.commit(claim.admission)
    state = world.state
    twice = replace(result, owners=(*result.owners, result.owners[-1]))
    with pytest.raises(InvariantError, match="twice"):
        world.manager.adopt_materialization(claim, twice)
    assert world.state is state
    world.manager.adopt_materialization(claim, replace(result, owners=result.owners[::-1]))
    world.check()


def test_tx_07_a_result_with_another_set_of_the_same_size_is_refused(worlds):
    world, claim = crowded(worlds)
    result = world.program.commit(claim.admission)
    state = world.state
    others = tuple(replace(ref, ordinal=ref.ordinal + 1) for ref in result.outcome.deleted)
    bad = [
        replace(result, outcome=replace(result.outcome, deleted=others)),
        replace(result, outcome=replace(result.outcome, deleted=result.outcome.deleted[1:])),
        replace(result, outcome=replace(result.outcome, evicted=())),
        replace(result, owners=()),
        replace(result, active=None),
        replace(result, outcome=replace(result.outcome, plan_id="another")),
    ]
    for wrong in bad:
        with pytest.raises(InvariantError):
            world.manager.adopt_materialization(claim, wrong)
        assert world.state is state  # nothing changed, the claim is still open
    world.manager.adopt_materialization(claim, result)
    world.check()


def test_an_abort_keeps_the_losses_that_really_happened(worlds):
    world, claim = crowded(worlds)
    before = world.manager.summary()["private"]["catalogued"]
    result = world.program.abort(claim.admission, num_done=1)
    assert isinstance(result.outcome, Aborted) and result.outcome.deleted
    world.manager.adopt_materialization(claim, result)
    world.check()
    after = world.manager.summary()
    assert after["private"]["catalogued"] == before - len(result.outcome.evicted)
    assert after["private"]["reserved"] == 0
    assert after["counters"]["checkpoints_dropped"] == len(result.outcome.deleted)


def test_a_full_private_catalog_gives_up_one_cell(worlds):  # Y-5, R-3
    world = worlds.make_world(lanes=1, private=2, slots=8)
    for start in (1000, 2000):
        world.turn(prompt(64, start))
    facts = world.request(prompt(64, 3000))
    admission = world.plan(facts)
    assert admission.vacant == 0
    (victim,) = [v for v in admission.plan.victims if v.evicted]
    claim = world.manager.claim(admission)
    at = claim.destination.cell_idx
    assert world.state.catalog.private[at].entry.summary.owner == victim.owner
    world.manager.adopt_materialization(claim, world.program.commit(admission))
    assert world.state.catalog.private[at].entry is None
    world.check()


def test_without_cache_everything_starts_from_root(worlds):  # F-4
    world = worlds.make_world(lanes=1, enabled=False, slots=0, host_slots=0, host_granules=0, anchors=0)
    for _ in range(2):
        _, admission = world.turn(prompt(100), closure=50)
        assert (admission.source_kind, admission.miss_reason) == ("root", "disabled")
    assert world.program.summaries() == {}
    world.check()


def test_a_result_that_names_a_stranger_is_refused(worlds):
    world = worlds.make_world()
    first, _ = world.turn(prompt(64))
    claim = world.claim(world.request(prompt(64, 5000)))
    result = world.program.commit(claim.admission)
    more = TransitionResult(result.outcome, result.active, (*result.owners, world.owner(first)))
    with pytest.raises(InvariantError, match="does not name it"):
        world.manager.adopt_materialization(claim, more)
