"""A random driver over real planner states: whatever happens, manager and program tell the same story."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer_jax import planner
from ninfer_jax.context_cache.lost import MAX_LOST_KEYS
from ninfer_jax.context_cache.records import Claim
from ninfer_jax.errors import ContractError, StaleHandleError
from ninfer_jax.identity import Evidence, equal_up_to, make_identity
from ninfer_jax.planner import OwnerKind
from ninfer_jax.planner.demand import WINDOW
from ninfer_jax.planner.plan import Readiness
from ninfer_jax.request import CacheMarker

SESSIONS = (None, "ana", "ben")


@dataclass(frozen=True)
class Text:
    """Tokens with the places where their prefill was split."""

    tokens: tuple[int, ...]
    rewrites: tuple[int, ...]


def segment(which: int) -> tuple[int, ...]:
    return tuple(range(1000 * which, 1000 * which + 30 + 17 * which))


def answer_of(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((sum(tokens) + i) % 97 for i in range(1 + len(tokens) % 20))


class Machine(RuleBasedStateMachine):
    worlds = None

    @initialize(
        lanes=st.integers(1, 3),
        slots=st.integers(0, 4),
        pages=st.integers(12, 40),
        private=st.integers(0, 2),
        shared=st.integers(0, 2),
        anchors=st.integers(0, 2),
        recency=st.booleans(),
    )
    def start(self, lanes, slots, pages, private, shared, anchors, recency):
        self.world = self.worlds.make_world(
            lanes=lanes,
            slots=slots,
            pages=pages,
            host_slots=2,
            host_granules=12,
            private=lanes + private,
            shared=shared,
            anchors=anchors,
            recency_eviction=recency,
        )
        self.world.tick_ns = 500_000  # a few looks and the optional search is over
        self.history = [Text(segment(1) + segment(2), ())]
        self.waiting = []
        self.active = {}
        self.bars = {}  # highest order that ever bound a session
        self.bound = {}
        self.last_order = {}

    # ---- requests

    @rule(
        back=st.integers(0, 3),
        how=st.sampled_from(["repeat", "extend", "edit", "new"]),
        which=st.integers(1, 4),
        session=st.sampled_from(SESSIONS),
        cache=st.sampled_from(["read_write"] * 5 + ["disabled"]),
        marked=st.sampled_from(["none", "none", "shared", "default", "anchor"]),
        updates=st.sampled_from([True, True, True, False]),
        output=st.integers(20, 60),
    )
    def submit(self, back, how, which, session, cache, marked, updates, output):
        if len(self.waiting) >= 3:
            return
        old = self.history[-1 - back % len(self.history)]
        if how == "repeat":
            text = old
        elif how == "extend":
            text = Text(old.tokens + answer_of(old.tokens) + segment(which), old.rewrites)
        elif how == "edit":
            cut = max(len(old.tokens) - 9, 1)
            text = Text(old.tokens[:cut] + segment(which), tuple(f for f in old.rewrites if f < cut))
        else:
            text = Text(segment(which) + segment(2), ())
        if len(text.tokens) > 420:
            text = self.history[0]
        closure = len(text.tokens) - 4
        rewrites = tuple(sorted({*text.rewrites, closure}))
        markers = {
            "none": (),
            "shared": (CacheMarker(1),),
            "default": (CacheMarker(1, evidence=Evidence.DEFAULT_AUTOMATIC),),
            "anchor": (CacheMarker(1, "private_long_anchor"), CacheMarker(2, "private_long_anchor")),
        }[marked]
        facts = self.world.request(
            make_identity(text.tokens, rewrite_execution_frontiers=rewrites),
            output=output,
            closure=closure,
            boundaries=(len(segment(1)), len(text.tokens) // 2),
            session=session,
            cache=cache,
            markers=markers,
            update_session_index=updates,
        )
        self.waiting.append(facts)
        self.history.append(Text(text.tokens, rewrites))

    @precondition(lambda self: self.waiting)
    @rule(at=st.integers(0, 2))
    def plan_only(self, at):
        """A dry run, also beside an open transition."""
        facts = self.waiting[at % len(self.waiting)]
        state, physical = self.world.state, self.world.program.state
        admission = self.world.plan(facts)
        again = self.world.plan(facts)
        assert self.world.state is state and self.world.program.state is physical
        assert admission.choices == again.choices and admission.choices[0].ref is None
        assert (admission.plan and admission.plan.plan_id) == (again.plan and again.plan.plan_id)
        self._check_sources(facts, admission)

    def _check_sources(self, facts, admission):
        """The digests never lose an exact source, and verification never lets a wrong one in (C-6)."""
        program = self.world.program
        expected = set()
        for key, summary in program.summaries().items():
            if summary.kind is OwnerKind.ACTIVE or not facts.participates:
                continue
            for c in summary.checkpoints:
                if equal_up_to(program.identities[key], facts.identity, c.frontier_tokens):
                    expected.add(c.ref)
        refs = [c.ref for c in admission.choices[1:]]
        assert set(refs) == expected and len(refs) == len(expected)
        if admission.chosen is not None and admission.chosen.ref is not None:
            assert admission.reused_tokens > 0
        else:
            assert admission.reused_tokens == 0
        assert all(c.frontier_tokens > admission.reused_tokens for c in admission.captures)
        assert admission.work.capture_frontiers == tuple(
            sorted({c.frontier_tokens for c in admission.captures})
        )

    @precondition(lambda self: self.waiting and self.world.state.open_claim is None)
    @rule(at=st.integers(0, 2))
    def claim(self, at):
        facts = self.waiting[at % len(self.waiting)]
        admission = self.world.plan(facts)
        self._check_sources(facts, admission)
        if admission.plan is None:
            lanes = self.world.program.state.capacity.lanes
            assert admission.readiness in (Readiness.TEMPORARILY_BLOCKED, Readiness.PERMANENTLY_INFEASIBLE)
            if not self.active and admission.readiness is Readiness.TEMPORARILY_BLOCKED:
                raise AssertionError(f"blocked with nothing active and {lanes} lanes (invariant 12)")
            if admission.readiness is Readiness.PERMANENTLY_INFEASIBLE:
                self.waiting.remove(facts)
            with pytest.raises(ContractError):
                self.world.manager.claim(admission)
            return
        self.world.manager.claim(admission)

    @precondition(lambda self: isinstance(self.world.state.open_claim, Claim))
    @rule(how=st.sampled_from(["commit"] * 4 + ["abort", "rollback"]), done=st.integers(0, 3))
    def settle(self, how, done):
        claim = self.world.state.open_claim
        facts, before = claim.admission.request, self.world.state
        if how == "rollback":
            self.world.manager.rollback(claim)
            assert self.world.state.portfolio is before.portfolio
            return
        if how == "abort":
            result = self.world.program.abort(claim.admission, done)
            self.world.manager.adopt_materialization(claim, result)
            assert self.world.state.counters.selected == before.counters.selected
            assert self.world.state.portfolio.demands == before.portfolio.demands
            return
        self.world.manager.adopt_materialization(claim, self.world.program.commit(claim.admission))
        self.waiting.remove(facts)
        self.active[facts.request_id] = facts

    # ---- active requests

    @precondition(lambda self: self.active and self.world.state.open_claim is None)
    @rule(at=st.integers(0, 2), fails=st.sampled_from([False, False, False, True]))
    def capture(self, at, fails):
        facts = list(self.active.values())[at % len(self.active)]
        manager, record = self.world.manager, self.world.state.actives[facts.request_id]
        frontiers = manager.capture_frontiers(facts.request_id)
        if not frontiers:
            return
        self.world.program.advance(record.handle, frontiers[0])
        state, physical = self.world.state, self.world.program.state
        plan = manager.capture_intent(facts.request_id, frontiers[0])
        assert self.world.state is state and self.world.program.state is physical
        if plan.is_skip:
            with pytest.raises(ContractError):
                manager.claim_capture(plan)
            manager.skip_captures(facts.request_id, frontiers[0])
            return
        claim = manager.claim_capture(plan)
        if fails:
            manager.rollback(claim)
            manager.skip_captures(facts.request_id, frontiers[0])
            return
        if plan.shared is not None:
            assert plan.shared.gain_ns > 0  # invariant 16
        manager.adopt_capture(claim, self.world.program.capture(record.handle, plan))

    @precondition(lambda self: self.active and self.world.state.open_claim is None)
    @rule(at=st.integers(0, 2), keeps=st.sampled_from([True, True, True, False]))
    def finish(self, at, keeps):
        facts = list(self.active.values())[at % len(self.active)]
        intent = self.world.manager.finish_intent(facts.request_id)
        assert intent.publish is facts.participates
        record = self.world.state.actives[facts.request_id]
        # what was not captured by now is passed over
        self.world.program.advance(record.handle, facts.prompt_tokens)
        del self.active[facts.request_id]
        if not (keeps and intent.publish):
            self.world.program.release(self.world.program.owner_of(intent.handle))
            self.world.manager.release_active(facts.request_id)
            return
        tokens = tuple(facts.identity.tokens.tolist())
        answer = answer_of(tokens)[: facts.work.max_output_tokens]
        self.world.manager.adopt_finish(facts.request_id, self.world.program.finish(intent.handle, answer))
        session = facts.binds_session
        if session is not None and facts.publication_order > self.bars.get(session, -1):
            self.bars[session] = facts.publication_order
            self.bound[session] = record.summary.owner_key

    @precondition(lambda self: self.world.state.open_claim is None)
    @rule(at=st.integers(0, 7))
    def evict(self, at):
        owners = [
            s.owner_key for s in self.world.program.summaries().values() if s.kind is not OwnerKind.ACTIVE
        ]
        if not owners:
            return
        key = owners[at % len(owners)]
        if any(edge.owner == key for edge in self.world.state.edges):
            with pytest.raises(ContractError):
                self.world.manager.release_intent(key)
            return
        intent = self.world.manager.release_intent(key)
        self.world.manager.adopt_release(intent, self.world.program.release(key.owner))
        with pytest.raises(StaleHandleError):
            self.world.manager.release_intent(key)

    # ---- what always holds

    @invariant()
    def one_story(self):
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def bindings_only_grow(self):  # invariant 14
        if not hasattr(self, "world"):
            return
        alive = set(self.world.program.summaries())
        index = self.world.state.sessions
        for session in SESSIONS[1:]:
            binding = index.bindings.get(session)
            order = -1 if binding is None else binding.order
            assert order >= self.last_order.get(session, -1)
            self.last_order[session] = order
            expected = self.bound.get(session)
            private = expected in alive and expected not in {
                r.summary.owner_key for r in self.world.state.actives.values()
            }
            if binding is not None and binding.claim is None:
                assert binding.owner == (expected if private else None)
            named = [
                c.entry for c in self.world.state.catalog.private if c.entry and c.entry.session == session
            ]
            assert [e.summary.owner_key for e in named] == ([expected] if private else [])

    @invariant()
    def nothing_grows_without_bound(self):
        if not hasattr(self, "world"):
            return
        state = self.world.state
        assert len(state.portfolio.demands) <= WINDOW and len(state.lost.owners) <= MAX_LOST_KEYS
        rows = {int(c.entry.summary.owner) for c in state.catalog.shared if c.entry}
        assert {c.owner for c in state.portfolio.credits} <= rows
        counters = state.counters
        assert sum(counters.selected.values()) == counters.materializations_committed
        assert counters.reused_tokens <= counters.prompt_tokens
        for record in state.actives.values():
            anchors = [
                c for c in record.summary.checkpoints if c.ref.kind is planner.CheckpointKind.LONG_ANCHOR
            ]
            assert len(anchors) <= self.world.max_long_anchors
        assert np.all(planner.used(self.world.program.state) <= self.world.program.state.capacity.units())


@pytest.mark.parametrize("examples", [10, pytest.param(500, marks=pytest.mark.slow)])
def test_manager_and_program_tell_the_same_story(worlds, examples):
    machine = type("BoundMachine", (Machine,), {"worlds": worlds})
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True
    )
    machine.TestCase("runTest").runTest()


def drive(worlds, seed, num_steps):
    """The same rules under weights that keep the lanes busy; returns the manager's counters."""
    rng = np.random.default_rng(seed)
    machine = type("DrivenMachine", (Machine,), {"worlds": worlds})()

    def pick(*options):
        return options[int(rng.integers(len(options)))]

    machine.start(
        lanes=pick(1, 2, 3),
        slots=int(rng.integers(0, 6)),
        pages=int(rng.integers(14, 60)),
        private=int(rng.integers(0, 4)),
        shared=pick(0, 1, 2),
        anchors=pick(0, 1, 2),
        recency=pick(False, True),
    )
    for _ in range(num_steps):
        claimed = machine.world.state.open_claim is not None
        names = ["plan_only"] * bool(machine.waiting) + ["submit"]
        if claimed:
            names += ["settle"] * 6
        else:
            names += ["claim"] * (4 * bool(machine.waiting))
            names += (["capture"] * 4 + ["finish"] * 2) * bool(machine.active)
            names += ["evict"] * (rng.random() < 0.2)
        name = pick(*names)
        if name == "submit":
            machine.submit(
                back=int(rng.integers(4)),
                how=pick("repeat", "extend", "extend", "edit", "new"),
                which=pick(1, 2, 3, 4),
                session=pick(*SESSIONS),
                cache=pick(*["read_write"] * 8, "disabled"),
                marked=pick("none", "shared", "default", "anchor"),
                updates=rng.random() < 0.8,
                output=int(rng.integers(20, 60)),
            )
        elif name == "settle":
            machine.settle(how=pick(*["commit"] * 6, "abort", "rollback"), done=int(rng.integers(4)))
        elif name == "capture":
            machine.capture(at=int(rng.integers(3)), fails=rng.random() < 0.1)
        elif name == "finish":
            machine.finish(at=int(rng.integers(3)), keeps=rng.random() < 0.85)
        else:
            getattr(machine, name)(at=int(rng.integers(8)))
        machine.one_story()
        machine.bindings_only_grow()
        machine.nothing_grows_without_bound()
    return machine.world.state.counters


@pytest.mark.parametrize("num_worlds", [12, pytest.param(1200, marks=pytest.mark.slow)])
def test_many_busy_worlds_tell_one_story_and_leave_no_path_out(worlds, num_worlds):
    seen: dict[str, int] = {}
    for seed in range(num_worlds):
        for name, value in vars(drive(worlds, seed, 60)).items():
            parts = {name: value} if isinstance(value, int) else {f"{name} {k}": v for k, v in value.items()}
            for key, count in parts.items():
                seen[key] = seen.get(key, 0) + count
    never = {
        "materializations_aborted",
        "captures_committed",
        "captures_skipped",
        "published_private",
        "published_shared",
        "discarded",
        "owners_evicted",
        "checkpoints_dropped",
        "selected root",
        "selected private_endpoint",
        "selected private_turn_closure",
        "selected private_response_replay",
        "missed no_match",
        "missed evicted",
        "missed disabled",
    } - {name for name, count in seen.items() if count}
    assert never == set(), seen
