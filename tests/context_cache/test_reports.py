"""What can be seen: explanations, miss reasons, counters, proofs; and what a fault leaves behind."""

from __future__ import annotations

import json

import pytest

from ninfer_jax import planner
from ninfer_jax.context_cache.explain import outcome_of
from ninfer_jax.context_cache.lost import MAX_LOST_KEYS, LostKeys, remember
from ninfer_jax.errors import ContractError
from ninfer_jax.identity import make_identity
from ninfer_jax.planner import StopReason
from ninfer_jax.planner.demand import WINDOW
from ninfer_jax.planner.plan import Readiness
from ninfer_jax.reuse import CheckpointSummary, OwnerKey, PrefixKey


def prompt(n, start=0):
    return list(range(start, start + n))


def test_obs_01_an_admission_without_pressure(worlds):
    world = worlds.make_world()
    world.turn(prompt(100), from_messages=False)
    admission = world.plan(world.request(prompt(150)))
    search = admission.planned.search
    assert search.stop is StopReason.NO_PRESSURE and search.num_targets == 0 and not search.is_fallback
    assert admission.readiness is Readiness.READY or admission.readiness is Readiness.NEEDS_TRANSFER


def test_obs_01_an_admission_that_clears_everything(worlds):
    world = worlds.make_world(lanes=1, pages=8, host_slots=0, host_granules=0)
    world.turn(prompt(64 * 4), from_messages=False, output=1)
    admission = world.plan(world.request(prompt(64 * 7, 9000), output=1))
    assert admission.planned.search.is_fallback
    assert [v.evicted for v in admission.plan.victims] == [True]
    assert admission.readiness is Readiness.NEEDS_TRANSFER


def test_a_plan_explains_itself_and_replays_bit_for_bit(worlds):
    world = worlds.make_world(lanes=1, pages=12, host_slots=2, host_granules=6)
    for start in (1000, 2000, 3000):
        world.turn(prompt(64 * 3, start), closure=64, session=f"s{start}", output=1)
    world.tick_ns = 10_000
    for facts in (
        world.request(prompt(64 * 8, 9000), output=10),
        world.request(prompt(64 * 3, 2000) + prompt(300, 7000), closure=64, session="s2000"),
        world.request(prompt(64 * 8, 9000), cache="disabled"),
    ):
        admission = world.plan(facts)
        outcome = outcome_of(admission)
        text = outcome.explain()
        assert f"{facts.prompt_tokens:,} prompt tokens" in text and "source" in text
        assert outcome.decision.plan_id == admission.plan.plan_id
        again = planner.from_json(outcome.to_json())
        assert planner.differences(again, planner.replay(again)) == ()
        assert "s2000" not in outcome.to_json() and json.loads(outcome.to_json())  # O-4: no key, no text


def test_infeasible_is_said_when_an_exact_source_cannot_be_used(worlds):
    world = worlds.make_world(model=worlds.UNIT)  # moving a state costs more than a short prompt
    world.turn(prompt(20), from_messages=False, session="other")
    admission = world.plan(world.request(prompt(40)))
    assert (admission.reused_tokens, admission.miss_reason) == (0, "infeasible")
    assert [h.checkpoint.frontier_tokens for h in admission.shortlist.verified] == [20]


def test_readiness_of_what_cannot_start(worlds):  # G-5, G-14
    world = worlds.make_world(lanes=1, pages=8)
    huge = world.plan(world.request(prompt(64 * 9)))
    assert huge.readiness is Readiness.PERMANENTLY_INFEASIBLE and huge.chosen is None
    facts = world.request(prompt(64))
    world.admit(facts)
    blocked = world.plan(world.request(prompt(64)))
    assert blocked.readiness is Readiness.TEMPORARILY_BLOCKED
    for admission in (huge, blocked):
        with pytest.raises(ContractError, match="nothing to claim"):
            world.manager.claim(admission)
        with pytest.raises(ContractError, match="no target to prove"):
            world.manager.prove_backfill(admission, head=huge.work, donors=[])
        assert outcome_of(admission).explain()


def test_a_request_is_admitted_once(worlds):
    world = worlds.make_world(lanes=2)
    facts = world.request(prompt(64))
    world.admit(facts)
    with pytest.raises(ContractError, match="active already"):
        world.claim(facts)


def test_bf_01_the_proof_speaks_of_requests(worlds):
    world = worlds.make_world(lanes=3, pages=20, slots=2, host_slots=0, host_granules=0)
    donor = world.request(prompt(64 * 8 - 20), output=20, from_messages=False)
    world.admit(donor)
    head = worlds.FakeWork(make_identity(prompt(64 * 14 - 20)), 20)
    for pages, qualifies in ((5, True), (7, False)):
        borrower = world.plan(world.request(prompt(64 * pages - 20, 9000), output=20, from_messages=False))
        proof = world.manager.prove_backfill(borrower, head=head, donors=[donor.request_id])
        assert isinstance(proof, planner.BackfillProof) is qualifies
    with pytest.raises(ContractError, match="is not active"):
        world.manager.prove_backfill(borrower, head=head, donors=[99])


def test_val_01_the_window_forgets_after_32(worlds):
    world = worlds.make_world(lanes=1, private=2)
    world.tick_ns = 500_000
    world.turn(prompt(100), from_messages=False)
    _, hit = world.turn(prompt(120), from_messages=False)
    key = hit.shortlist.verified[0].checkpoint.key

    def counts():
        return sum(key in d.matched for d in world.state.portfolio.demands)

    assert counts() == 1
    for n in range(WINDOW - 1):
        world.turn(prompt(64, 1000 * (n + 1)), from_messages=False)
        assert counts() == 1 and len(world.state.portfolio.demands) <= WINDOW
    world.turn(prompt(64, 900_000), from_messages=False)
    assert counts() == 0
    world.turn(prompt(64, 950_000), from_messages=False, cache="disabled")
    assert len(world.state.portfolio.demands) == WINDOW
    text = repr(world.state.portfolio)
    assert "tokens" not in text.replace("frontier_tokens", "")  # O-4: domains and keys only


def test_domains_are_the_session_or_one_of_their_own(worlds):  # O-4
    world = worlds.make_world()
    for session in ("ana", "ana", None, None):
        world.turn(prompt(64, 1000 * world.next_id), session=session)
    domains = [d.domain for d in world.state.portfolio.demands]
    assert len(set(domains)) == 3 and domains[0] == domains[1]
    assert all(b"ana" not in d for d in domains)


def test_the_summary_adds_up(worlds):  # issue item 8: sums equal the per-request records
    world = worlds.make_world()
    world.tick_ns = 500_000
    records = []
    for n in range(12):
        tokens = prompt(70 + 10 * (n % 3)) if n % 2 else prompt(90, 1000 * n)
        records.append(world.turn(tokens, session="s" if n % 3 else None, answer=range(n))[1])
    summary = world.manager.summary()
    counters = summary["counters"]
    assert counters["reused_tokens"] == sum(r.reused_tokens for r in records)
    assert counters["prompt_tokens"] == sum(r.request.prompt_tokens for r in records)
    for kind in {r.source_kind for r in records}:
        assert counters["selected"][kind] == sum(r.source_kind == kind for r in records)
    for reason in {r.miss_reason for r in records} - {None}:
        assert counters["missed"][reason] == sum(r.miss_reason == reason for r in records)
    assert summary["private"]["catalogued"] == counters["published_private"] - counters[
        "owners_evicted"
    ] - sum(r.chosen.disposition is planner.Disposition.CONSUME for r in records)
    assert summary["active"] == summary["edges"] == summary["private"]["reserved"] == 0
    json.dumps(summary)


def test_q_7_a_reset_forgets_what_lived_in_the_program(worlds):
    world = worlds.make_world()
    world.turn(prompt(100), session="s")
    open_request = world.request(prompt(80, 4000))
    world.admit(open_request)
    claim = world.claim(world.request(prompt(120), session="s"))
    committed = world.state.counters.materializations_committed
    world.program.state = planner.make_state(
        world.program.state.capacity, revision=world.program.state.revision + 1
    )
    world.manager.reset()
    world.check()
    assert world.state.open_claim is None and world.state.portfolio.demands == ()
    assert world.state.counters.materializations_committed == committed
    with pytest.raises(ContractError, match="not open"):
        world.manager.rollback(claim)
    with pytest.raises(ContractError, match="is not active"):
        world.manager.finish_intent(open_request.request_id)
    late = world.request(prompt(60), session="s")
    world.admit(late)
    world.finish(late)
    assert world.state.sessions.bound("s") == world.owner(late).owner_key


def test_recency_is_told_only_where_it_is_asked_for(worlds):  # G-7
    plain, ladder = worlds.make_world(), worlds.make_world(recency_eviction=True)
    for world in (plain, ladder):
        world.turn(prompt(64))
        world.turn(prompt(64, 4000))
    assert plain.plan(plain.request(prompt(70))).recency is None
    recency = ladder.plan(ladder.request(prompt(70, 9000))).recency
    rows = [int(c.entry.summary.owner) for c in ladder.state.catalog.private if c.entry]
    assert 0 < recency[rows[0]] < recency[rows[1]]
    assert all(r == -1 for o, r in enumerate(recency) if o not in rows)


def test_the_memory_of_lost_keys_is_small():
    lost = LostKeys()
    ref = planner.CheckpointRef(0, 1, planner.CheckpointKind.SESSION_ENDPOINT, 0)
    for n in range(MAX_LOST_KEYS + 10):
        key = PrefixKey(n + 1, 0, n, "text")
        lost = remember(lost, [(OwnerKey(0, 1), CheckpointSummary(ref, 0, n, key))])
    assert len(lost.owners) == MAX_LOST_KEYS
    assert min(k.frontier_tokens for k in lost.owners) == 10


def test_too_few_cells_are_refused_at_construction(worlds):  # F-3
    world = worlds.make_world(lanes=2)
    options = world.manager._options
    with pytest.raises(ContractError, match="F-3"):
        type(world.manager)(world.program, options, num_lanes=99, model=worlds.UNIT, units=worlds.UNITS)
