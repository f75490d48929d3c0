"""A program without a model, and a manager driven against it.

Owns FakeProgram: planner states and operations, exact identities in a dict, no bytes. It fulfils the Protocol
of the manager and plays the worker's other half: start, commit, abort, capture, finish, release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any

import numpy as np

from ninfer_jax import planner
from ninfer_jax.context_cache.ports import CaptureUnits
from ninfer_jax.context_cache.records import Admission, CacheState, CapturePlan, Claim
from ninfer_jax.context_cache.request_facts import RequestFacts
from ninfer_jax.context_cache.resource_manager import ResourceManager
from ninfer_jax.digests import PrefixDigests, make_digests
from ninfer_jax.identity import (
    Boundary,
    BoundaryKind,
    PromptIdentity,
    equal_up_to,
    extend_identity,
    make_identity,
)
from ninfer_jax.options import ContextCacheOptions, EngineOptions, ResolvedCacheOptions, resolve
from ninfer_jax.planner.cost import Q32, PrefillModel, TransferCoefficients, TransferModel
from ninfer_jax.planner.plan import Aborted, Committed
from ninfer_jax.planner.post_state import degraded
from ninfer_jax.planner.transition import committed
from ninfer_jax.request import RequestId, SequenceHandle, make_request_hints
from ninfer_jax.reuse import (
    CheckpointSummary,
    OwnerKey,
    OwnerSummary,
    SourceChoice,
    TransitionResult,
    zero_stage_result,
)

PAGE = 64
CHUNK = 1024
BYTE = TransferCoefficients(0, 0, Q32)
UNIT = planner.MachineCostModel(TransferModel(BYTE, BYTE, BYTE), PrefillModel(0, Q32, 0, 0, 0))
# a token costs more than moving a small state, as on a real machine
DEAR_PREFILL = planner.MachineCostModel(TransferModel(BYTE, BYTE, BYTE), PrefillModel(0, 1000 * Q32, 0, 0, 0))
UNITS = CaptureUnits(page_tokens=PAGE, prefill_chunk_tokens=CHUNK, state_bytes=100, page_bytes=(10,))


@dataclass(frozen=True, eq=False)
class FakeWork:
    """What a request needs of the program."""

    identity: PromptIdentity
    max_output_tokens: int
    capture_frontiers: tuple[int, ...] = ()


class FakeProgram:
    """Holds one PhysicalState and the exact tokens of every owner."""

    def __init__(
        self,
        capacity: planner.PhysicalCapacity,
        *,
        digests: Callable[[PromptIdentity], PrefixDigests] = make_digests,
    ) -> None:
        self.state = planner.make_state(capacity)
        self.identities: dict[OwnerKey, PromptIdentity] = {}
        self._digests = digests
        self._known: dict[PromptIdentity, PrefixDigests] = {}
        self.num_problems = 0

    # ---- the manager's Protocol

    @property
    def resource_revision(self) -> int:
        return self.state.revision

    def verify(self, ref: planner.CheckpointRef, identity: PromptIdentity) -> bool:
        row = self.row_of(ref)
        if row is None or not planner.is_valid(self.state, row):
            return False
        mine = self.identities[OwnerKey(ref.owner, ref.generation)]
        return equal_up_to(mine, identity, int(self.state.checkpoint_frontier[row]))

    def problem(self, work: FakeWork, choices: Sequence[SourceChoice]) -> planner.Problem:
        self.num_problems += 1
        request = self.request_work(work)
        candidates = [
            planner.Candidate(
                i,
                None if choice.ref is None else self.row_of(choice.ref),
                choice.disposition,
                request,
                choice.is_session_binding,
            )
            for i, choice in enumerate(choices)
        ]
        return planner.make_problem(self.state, candidates)

    def capture_problem(self, handle: SequenceHandle) -> planner.Problem:
        frontier = self.state.owner_frontier[self.owner_of(handle)]
        return planner.make_problem(
            self.state, [planner.capture_candidate(self.state.capacity, tuple(frontier.tolist()))]
        )

    def backfill(self, problem, target, *, head, donors):
        owners = [self.owner_of(h) for h in donors]
        return planner.prove_backfill(problem, target, head=self.request_work(head), donors=owners)

    # ---- the worker's half

    def request_work(self, work: FakeWork) -> planner.RequestWork:
        return planner.make_request(
            work.identity.num_tokens,
            work.max_output_tokens,
            chunk_tokens=CHUNK,
            rewrite_frontiers=(*work.identity.rewrite_execution_frontiers, *work.capture_frontiers),
        )

    def commit(self, admission: Admission) -> TransitionResult:
        plan, problem, target = admission.plan, admission.problem, admission.target
        assert not planner.is_stale(plan, self.resource_revision)
        self.state, owner = planner.apply(problem, target)
        key = self.key_of(owner)
        self.identities[key] = admission.work.identity
        outcome = committed(problem, target, plan, self.state.revision, owner)
        touched = [v.owner for v in plan.victims if v.owner not in outcome.evicted]
        if plan.source is not None and admission.chosen.disposition is planner.Disposition.RETAIN:
            touched.append(plan.source.owner)
        rows = [self.summary(o) for o in touched if o != owner]
        rows.append(self.summary(owner))
        self._forget()
        return TransitionResult(outcome, SequenceHandle(int(owner), int(key.generation)), tuple(rows))

    def abort(self, admission: Admission, num_done: int = 0) -> TransitionResult:
        """Stops after the first `num_done` victims really lost what was planned (X-9)."""
        plan = admission.plan
        deleted, evicted, rows = [], [], []
        for victim in plan.victims[:num_done]:
            if victim.evicted:
                deleted += [planner.checkpoint_ref(self.state, c) for c in self.rows_of(victim.owner)]
                evicted.append(victim.owner)
                self.state = planner.evict(self.state, victim.owner)
                continue
            for ref in victim.dropped:
                self.state = planner.drop_checkpoint(self.state, self.row_of(ref))
                deleted.append(ref)
            rows.append(self.summary(victim.owner))
        self._forget()
        outcome = Aborted(plan.plan_id, self.state.revision, "stopped", tuple(deleted), tuple(evicted))
        return TransitionResult(outcome, None, tuple(rows))

    def advance(self, handle: SequenceHandle, frontier: int) -> None:
        owner = self.owner_of(handle)
        if frontier > int(self.state.owner_frontier[owner, 0]):
            self.state = planner.advance(self.state, owner, frontier)

    def capture(self, handle: SequenceHandle, plan: CapturePlan) -> TransitionResult:
        owner, before = self.owner_of(handle), self.state
        try:
            if plan.private is not None:
                return self._capture_private(owner, plan)
            return self._capture_shared(owner, plan)
        except ValueError:
            self.state = before
            return TransitionResult(Aborted("", before.revision, "no room"), None, ())

    def _capture_private(self, owner: int, plan: CapturePlan) -> TransitionResult:
        deleted = ()
        if plan.private.replaces is not None:
            deleted = (plan.private.replaces,)
            self.state = planner.drop_checkpoint(self.state, self.row_of(plan.private.replaces))
        spec = planner.CheckpointSpec(plan.frontier_tokens, plan.private.kind, plan.private.ordinal)
        self.state = self._captured(owner, spec, shared=False)[0]
        return zero_stage_result(self.state.revision, [self.summary(owner)], deleted=deleted)

    def _capture_shared(self, owner: int, plan: CapturePlan) -> TransitionResult:
        part = plan.shared
        before = {v.owner: self.summary(v.owner) for v in part.plan.victims}
        self.state = degraded(part.problem, part.target)
        kind = planner.CheckpointKind.SHARED_STABLE_PREFIX
        self.state, holder = self._captured(
            owner, planner.CheckpointSpec(plan.frontier_tokens, kind), shared=True
        )
        self.identities[self.key_of(holder)] = self.identities[self.key_of(owner)]
        evicted = tuple(v.owner for v in part.plan.victims if v.evicted)
        deleted, rows = [], [self.summary(holder), self.summary(owner)]
        for victim in part.plan.victims:
            deleted += before[victim.owner].refs if victim.evicted else victim.dropped
            if not victim.evicted:
                rows.append(self.summary(victim.owner))
        self._forget()
        outcome = Committed(part.plan.plan_id, self.state.revision, None, tuple(deleted), evicted)
        return TransitionResult(outcome, None, tuple(rows))

    def _captured(self, owner: int, spec, *, shared: bool):
        try:
            return planner.capture(self.state, owner, spec, shared=shared)
        except ValueError:
            return planner.capture(self.state, owner, spec, shared=shared, state_tier=planner.Tier.HOST)

    def finish(self, handle: SequenceHandle, output: Sequence[int]) -> TransitionResult:
        owner = self.owner_of(handle)
        key = self.key_of(owner)
        self.identities[key] = extend_identity(self.identities[key], output)
        end = self.identities[key].num_tokens
        self.advance(handle, end)
        for row in self.rows_of(owner):
            if int(self.state.checkpoint_frontier[row]) == end:
                self.state = planner.drop_checkpoint(self.state, row)
        self.state = planner.finish(self.state, owner)
        return zero_stage_result(self.state.revision, [self.summary(owner)])

    def release(self, owner: int) -> TransitionResult:
        refs = [planner.checkpoint_ref(self.state, c) for c in self.rows_of(owner)]
        active = self.state.owner_kind[owner] == planner.OwnerKind.ACTIVE
        self.state = planner.evict(self.state, owner)
        self._forget()
        evicted = () if active else (owner,)
        return zero_stage_result(self.state.revision, deleted=refs, evicted=evicted)

    # ---- looking

    def owner_of(self, handle: SequenceHandle) -> int:
        assert int(self.state.owner_generation[handle.lane]) == handle.generation
        return handle.lane

    def key_of(self, owner: int) -> OwnerKey:
        return OwnerKey(int(owner), int(self.state.owner_generation[owner]))

    def rows_of(self, owner: int) -> list[int]:
        return planner.checkpoints_of(self.state, owner).tolist()

    def row_of(self, ref: planner.CheckpointRef) -> int | None:
        if int(self.state.owner_generation[ref.owner]) != ref.generation:
            return None
        rows = [c for c in self.rows_of(ref.owner) if planner.checkpoint_ref(self.state, c) == ref]
        return rows[0] if rows else None

    def summary(self, owner: int) -> OwnerSummary:
        key = self.key_of(owner)
        digests = self._digests_of(self.identities[key])
        checkpoints = [
            CheckpointSummary(
                planner.checkpoint_ref(self.state, c),
                c,
                int(self.state.checkpoint_frontier[c]),
                digests.key(int(self.state.checkpoint_frontier[c])),
            )
            for c in self.rows_of(owner)
        ]
        kind = planner.OwnerKind(int(self.state.owner_kind[owner]))
        return OwnerSummary(key.owner, key.generation, kind, tuple(checkpoints))

    def _digests_of(self, identity: PromptIdentity) -> PrefixDigests:
        if identity not in self._known:  # by object: identities never change
            self._known[identity] = self._digests(identity)
        return self._known[identity]

    def summaries(self) -> dict[OwnerKey, OwnerSummary]:
        """Every owner that exists, as the program sees it."""
        free = planner.OwnerKind.FREE
        owners = [o for o in range(self.state.num_owners) if self.state.owner_kind[o] != free]
        return {self.key_of(o): self.summary(o) for o in owners}

    def _forget(self) -> None:
        alive = {
            self.key_of(o)
            for o in range(self.state.num_owners)
            if self.state.owner_kind[o] != planner.OwnerKind.FREE
        }
        self.identities = {k: v for k, v in self.identities.items() if k in alive}


@dataclass
class World:
    """One manager with its program; every request gets the next publication order."""

    program: FakeProgram
    manager: ResourceManager
    digests: Callable[[PromptIdentity], PrefixDigests] = make_digests
    next_id: int = 0
    cache_enabled: bool = True
    max_long_anchors: int = 2
    admissions: dict[int, Admission] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    tick_ns: int = 0  # what each look at the clock takes

    @property
    def state(self) -> CacheState:
        return self.manager.state

    def request(
        self,
        tokens: Sequence[int] | PromptIdentity,
        *,
        output: int = 32,
        closure: int | None = None,
        boundaries: Sequence[int] = (),
        anchor: int | None = None,
        from_messages: bool = True,
        **hints: Any,
    ) -> RequestFacts:
        """A request; `boundaries` are the ends of messages 1, 2, ...; `closure` ends the last user query."""
        identity = tokens
        if not isinstance(tokens, PromptIdentity):
            identity = make_identity(tokens, rewrite_execution_frontiers=() if closure is None else [closure])
        number, self.next_id = self.next_id, self.next_id + 1
        return RequestFacts(
            request_id=RequestId(number),
            publication_order=number,
            hints=make_request_hints(
                cache_enabled=self.cache_enabled, max_long_anchors=self.max_long_anchors, **hints
            ),
            identity=identity,
            digests=self.digests(identity),
            work=FakeWork(identity, output),
            boundaries=tuple(Boundary(f, i, BoundaryKind.MESSAGE) for i, f in enumerate(boundaries, 1)),
            turn_closure_frontier=closure,
            prompt_end_anchor=anchor,
            from_messages=from_messages,
        )

    def plan(self, facts: RequestFacts) -> Admission:
        readings = count(0, self.tick_ns) if self.tick_ns else repeat(0)
        return self.manager.plan(facts, allowance_ns=10**7, runnable_requests=0, clock=lambda: next(readings))

    def claim(self, facts: RequestFacts) -> Claim:
        return self.manager.claim(self.plan(facts))

    def admit(self, facts: RequestFacts) -> Admission:
        claim = self.claim(facts)
        self.manager.adopt_materialization(claim, self.program.commit(claim.admission))
        self.admissions[facts.request_id] = claim.admission
        self.rows[facts.request_id] = int(self.state.actives[facts.request_id].summary.owner)
        return claim.admission

    def prefill(self, facts: RequestFacts) -> list[CapturePlan]:
        """Computes the prompt, capturing on the way; returns what was captured."""
        done, record = [], self.state.actives[facts.request_id]
        for frontier in self.manager.capture_frontiers(facts.request_id):
            self.program.advance(record.handle, frontier)
            while not (plan := self.manager.capture_intent(facts.request_id, frontier)).is_skip:
                claim = self.manager.claim_capture(plan)
                result = self.program.capture(record.handle, plan)
                self.manager.adopt_capture(claim, result)
                if isinstance(result.outcome, Committed):
                    done.append(plan)
            self.manager.skip_captures(facts.request_id, frontier)
        self.program.advance(record.handle, facts.prompt_tokens)
        return done

    def finish(self, facts: RequestFacts, output: Sequence[int] = ()) -> None:
        intent = self.manager.finish_intent(facts.request_id)
        if intent.publish:
            self.manager.adopt_finish(facts.request_id, self.program.finish(intent.handle, output))
        else:
            self.program.release(self.program.owner_of(intent.handle))
            self.manager.release_active(facts.request_id)

    def turn(self, tokens, *, answer: Sequence[int] = (), **kwargs: Any) -> tuple[RequestFacts, Admission]:
        """One whole request."""
        facts = self.request(tokens, **kwargs)
        admission = self.admit(facts)
        self.prefill(facts)
        self.finish(facts, answer)
        return facts, admission

    def owner(self, facts: RequestFacts) -> OwnerSummary:
        """What the request published."""
        (found,) = [
            cell.entry.summary
            for cell in self.state.catalog.private
            if cell.entry is not None and cell.entry.order == facts.publication_order
        ]
        return found

    def program_owner(self, facts: RequestFacts) -> int:
        """The row that the request had while it was active."""
        return int(self.rows[facts.request_id])

    def entry(self, facts: RequestFacts):
        (found,) = [
            cell.entry
            for cell in self.state.catalog.private
            if cell.entry is not None and cell.entry.order == facts.publication_order
        ]
        return found

    def check(self) -> None:
        """Manager and program agree about owners, checkpoints, edges and cells."""
        planner.check_invariants(self.program.state)
        catalogued = {}
        for kind, row in (
            (planner.OwnerKind.PRIVATE, self.state.catalog.private),
            (planner.OwnerKind.SHARED, self.state.catalog.shared),
        ):
            for cell in row:
                if cell.entry is not None:
                    assert cell.entry.summary.kind is kind
                    assert cell.entry.summary.owner_key not in catalogued
                    catalogued[cell.entry.summary.owner_key] = cell.entry.summary
        for record in self.state.actives.values():
            catalogued[record.summary.owner_key] = record.summary
        assert catalogued == self.program.summaries()
        physical = self.program.state
        edges = {(a, o) for a, o in zip(*np.nonzero(physical.edges), strict=True)}
        active = {i: r.summary.owner for i, r in self.state.actives.items()}
        assert {(active[e.request_id], e.owner.owner) for e in self.state.edges} == edges
        reserved = [c.reserved_by for c in self.state.catalog.private if c.reserved_by is not None]
        assert len(set(reserved)) == len(reserved)
        open_claim = self.state.open_claim
        if open_claim is None:
            publishing = {i for i, r in self.state.actives.items() if r.cell is not None}
            assert set(reserved) == publishing
            for i in publishing:
                assert self.state.catalog.private[self.state.actives[i].cell.cell_idx].entry is None
            assert not any(c.reserved_by is not None for c in self.state.catalog.shared)


def make_world(
    *,
    lanes: int = 2,
    slots: int | None = None,
    pages: int = 200,
    host_slots: int = 4,
    host_granules: int = 100,
    private: int | None = None,
    shared: int | None = None,
    anchors: int = 2,
    digests: Callable[[PromptIdentity], PrefixDigests] = make_digests,
    model: planner.MachineCostModel = DEAR_PREFILL,
    **options: Any,
) -> World:
    """A fresh world. `slots` counts H, the Device states beside the C of the lanes."""
    cache = ContextCacheOptions(
        device_state_slots=lanes if slots is None else slots,
        host_state_slots=host_slots,
        host_kv_capacity_bytes=10 * host_granules,
        max_private_continuations=private,
        max_shared_prefixes=shared,
        max_long_anchors_per_continuation=anchors,
        **options,
    )
    resolved = resolve_cache(cache, lanes)
    capacity = planner.make_capacity(
        device_state_slots=lanes + resolved.device_state_slots,
        device_pages=pages,
        host_state_slots=host_slots,
        host_kv_granules=host_granules,
        granule_bytes=10,
        state_image_bytes=100,
        lanes=lanes,
    )
    program = FakeProgram(capacity, digests=digests)
    manager = ResourceManager(program, resolved, num_lanes=lanes, model=model, units=UNITS)
    return World(program, manager, digests, cache_enabled=resolved.enabled, max_long_anchors=anchors)


def resolve_cache(cache: ContextCacheOptions, lanes: int) -> ResolvedCacheOptions:
    """The cache part of resolved options."""
    return resolve(EngineOptions(max_concurrency=lanes, cache=cache), platform="cpu").cache
