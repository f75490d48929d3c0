"""The manager against the real Program over the model-free executor.

The executor re-reads the whole history in every step, so what was restored is what would have been computed;
both sides are compared after every transition.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from ninfer_jax.context_cache.ports import CaptureUnits
from ninfer_jax.context_cache.request_facts import RequestFacts
from ninfer_jax.context_cache.resource_manager import ResourceManager
from ninfer_jax.digests import make_digests
from ninfer_jax.identity import Boundary, BoundaryKind, make_identity
from ninfer_jax.options import ContextCacheOptions
from ninfer_jax.planner import OwnerKind
from ninfer_jax.planner.plan import Committed
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.fake import open_fake_program
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.request import CacheMarker, make_request_hints

VOCAB = 50


def ticking():
    """A clock that passes half a millisecond with each look, so that the optional search stays short."""
    return count(0, 500_000).__next__


class Pair:
    """One program and its manager; plays the worker for one request at a time."""

    def __init__(self, worlds, **settings):
        settings = {
            "num_lanes": 2,
            "extra_state_slots": 6,
            "host_state_slots": 4,
            "host_pages": 24,
        } | settings
        self.program = open_fake_program(vocab_size=VOCAB, verify=True, **settings)
        lanes = settings["num_lanes"]
        options = worlds.resolve_cache(ContextCacheOptions(max_private_continuations=lanes + 4), lanes)
        self.manager = ResourceManager(
            self.program,
            options,
            num_lanes=lanes,
            model=worlds.DEAR_PREFILL,
            units=CaptureUnits(64, 128, 100, (10,)),
        )
        self.worlds, self.next_id = worlds, 0

    def request(self, tokens, *, rewrites=(), closure=None, output=6, boundaries=(), **hints):
        identity = make_identity(tokens, rewrite_execution_frontiers=rewrites)
        number, self.next_id = self.next_id, self.next_id + 1
        return RequestFacts(
            request_id=number,
            publication_order=number,
            hints=make_request_hints(cache_enabled=True, max_long_anchors=2, **hints),
            identity=identity,
            digests=make_digests(identity),
            work=RequestWork(identity, output, LaneSampling()),
            boundaries=tuple(Boundary(f, n, BoundaryKind.MESSAGE) for n, f in enumerate(boundaries, 1)),
            turn_closure_frontier=closure,
            prompt_end_anchor=None,
            from_messages=True,
        )

    def admit(self, facts):
        admission = self.manager.plan(facts, allowance_ns=10**7, runnable_requests=0, clock=ticking())
        claim = self.manager.claim(admission)
        self.program.start(admission.plan, admission.problem, admission.target, admission.work)
        self.manager.adopt_materialization(claim, self.settled())
        self.check()
        return admission

    def settled(self):
        while (result := self.program.advance_transition()) is None:
            self.program.wait_for_copies()
        return result

    def capture(self, facts):
        handle = self.manager.state.actives[facts.request_id].handle
        frontier = self.program.frontier_tokens(handle)
        if frontier not in self.manager.capture_frontiers(facts.request_id):
            return
        while not (plan := self.manager.capture_intent(facts.request_id, frontier)).is_skip:
            claim = self.manager.claim_capture(plan)
            if plan.private is not None:
                part = plan.private
                result = self.program.capture_private(
                    handle, part.kind, ordinal=part.ordinal, replaces=part.replaces
                )
            else:
                part = plan.shared
                self.program.start_capture(part.plan, part.problem, part.target, handle)
                result = self.settled()
            self.manager.adopt_capture(claim, result)
            self.check()
        self.manager.skip_captures(facts.request_id, frontier)

    def generate(self, facts):
        """Everything after admission; returns the output."""
        handle = self.manager.state.actives[facts.request_id].handle
        while (pending := self.program.prefill(handle)) is None:
            self.capture(facts)
        self.program.commit(pending, [1])
        self.capture(facts)
        for _ in range(facts.work.max_output_tokens - 1):
            self.program.commit(self.program.decode([handle]), [1])
        output = [int(t) for t in self.program.facts(handle).ledger_tokens[facts.prompt_tokens :]]
        self.program.terminate(handle)
        if self.manager.finish_intent(facts.request_id).publish:
            self.manager.adopt_finish(facts.request_id, self.program.finish(handle))
        else:
            self.program.discard(handle)
            self.manager.release_active(facts.request_id)
        self.check()
        return output

    def turn(self, tokens, **kwargs):
        facts = self.request(tokens, **kwargs)
        admission = self.admit(facts)
        return admission, self.generate(facts)

    def check(self):
        self.program.check()
        state = self.manager.state
        cells = [(OwnerKind.PRIVATE, c) for c in state.catalog.private]
        cells += [(OwnerKind.SHARED, c) for c in state.catalog.shared]
        for kind, cell in cells:
            if cell.entry is not None:
                summary = cell.entry.summary
                assert summary.kind is kind and self.program.summary(summary.owner) == summary
        for record in state.actives.values():
            assert self.program.summary(record.summary.owner) == record.summary


def text(n, start=0):
    return [(start + 7 * i) % VOCAB for i in range(n)]


def test_a_conversation_with_regeneration_and_an_edit(worlds):  # E2E-02, issue item 3
    pair = Pair(worlds)
    first = text(150)
    cold, answer = pair.turn(first, rewrites=[140], closure=140, session="s")
    assert cold.source_kind == "root" and pair.manager.summary()["checkpoints"] == 3
    again, same = pair.turn(first, rewrites=[140], closure=140, session="s")
    assert (again.source_kind, again.reused_tokens) == ("private_response_replay", 150)
    assert same == answer
    history = first + answer[:-1]  # the last token was drawn and never fed
    longer = history + text(60, 3)
    end = len(longer) - 5
    warm, _ = pair.turn(longer, rewrites=[140, end], closure=end, session="s")
    assert (warm.source_kind, warm.reused_tokens) == ("private_endpoint", len(history))
    edited = longer[:end] + text(30, 11)
    edit, _ = pair.turn(edited, rewrites=[140, end], closure=end, session="s")
    assert (edit.source_kind, edit.reused_tokens) == ("private_turn_closure", end)
    disabled, _ = pair.turn(edited, rewrites=[140, end], closure=end, session="s", cache="disabled")
    assert disabled.miss_reason == "disabled"


@pytest.mark.parametrize("length", [128, 100])
def test_a_shared_prefix_serves_other_conversations(worlds, length):  # MV-05, COW-04, COW-05
    pair = Pair(worlds)
    system = text(length)
    for n in range(3):
        admission, _ = pair.turn(
            system + text(30, 13 + n), boundaries=[length], markers=[CacheMarker(1)], session=f"s{n}"
        )
        assert admission.source_kind == ("shared_stable_prefix" if n else "root")
        assert admission.reused_tokens == (length if n else 0)
    assert pair.manager.summary()["shared"]["catalogued"] == 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 30))])
def test_random_conversations_on_a_small_machine(worlds, seed):
    rng = np.random.default_rng(seed)
    pair = Pair(
        worlds,
        num_pages=14,
        extra_state_slots=int(rng.integers(1, 4)),
        host_state_slots=int(rng.integers(0, 3)),
        host_pages=int(rng.integers(0, 8)),
    )
    history = [(text(120), ())]
    kinds = set()
    for _ in range(25):
        tokens, rewrites = history[int(rng.integers(len(history)))]
        how = int(rng.integers(4))
        if how == 1:
            tokens = tokens + text(int(rng.integers(5, 60)), int(rng.integers(50)))
        elif how == 2:
            cut = max(len(tokens) - int(rng.integers(1, 40)), 2)
            tokens = tokens[:cut] + text(10, int(rng.integers(50)))
            rewrites = tuple(f for f in rewrites if f < cut)
        if len(tokens) > 400:
            tokens, rewrites = history[0]
        closure = len(tokens) - 3
        rewrites = tuple(sorted({*rewrites, closure}))
        admission, answer = pair.turn(
            tokens,
            rewrites=rewrites,
            closure=closure,
            boundaries=[64],
            session=[None, "a", "b"][int(rng.integers(3))],
            markers=[CacheMarker(1)] if rng.random() < 0.3 else (),
        )
        kinds.add(admission.source_kind)
        history.append((tokens + answer[:-1], rewrites))
    assert len(kinds) > 1
    counters = pair.manager.summary()["counters"]
    assert counters["materializations_committed"] == 25 and counters["owners_evicted"] > 0


def test_an_aborted_start_leaves_both_sides_as_they_were(worlds):
    pair = Pair(worlds, num_pages=10, extra_state_slots=1)
    pair.turn(text(150), closure=140, rewrites=[140], session="s")
    facts = pair.request(text(300, 5), output=200)
    admission = pair.manager.plan(facts, allowance_ns=10**7, runnable_requests=0, clock=ticking())
    assert admission.plan.victims
    claim = pair.manager.claim(admission)
    pair.program.start(admission.plan, admission.problem, admission.target, admission.work)
    pair.program.cancel_transition()
    result = pair.settled()
    assert not isinstance(result.outcome, Committed)
    pair.manager.adopt_materialization(claim, result)
    pair.check()
    assert pair.manager.state.counters.materializations_aborted == 1
    again = pair.admit(facts)
    assert again.plan is not None
