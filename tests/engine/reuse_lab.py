"""Engines that reuse context over the model-free executor, with an inspector that watches every transition.

Owns a frontend whose messages are token ids, the engine around it, and `Watch`: what must be true after each
boundary, recomputed from the objects and from the bytes that the executor holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from ninfer_jax.context_cache.catalog import cells, entries
from ninfer_jax.engine import Engine
from ninfer_jax.errors import ContractError, StalePlanError
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.frontend.generation_config import GenerationConfig
from ninfer_jax.identity import Boundary, BoundaryKind, PreparedPrompt, make_identity
from ninfer_jax.options import make_engine_options, resolve
from ninfer_jax.parts import EngineParts, ModelFacts
from ninfer_jax.planner.ids import NO_EXTENT, NO_POOL, NO_SLOT, OwnerId, OwnerKind
from ninfer_jax.planner.plan import Committed, ResourcePlan
from ninfer_jax.planner.problem import identity_targets, maximal_targets
from ninfer_jax.planner.projection import assess_numpy
from ninfer_jax.planner.state import checkpoints_of, space, used
from ninfer_jax.planner.target import take
from ninfer_jax.planner.transition import seal
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.capacity import CapacityVector, PoolCapacity, PoolKind
from ninfer_jax.program.fake import FakeExecutor, expected_tokens, mix
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.memory_table import MemoryTable
from ninfer_jax.program.program import Program
from ninfer_jax.reuse import ROOT_CHOICE, OwnerKey
from ninfer_jax.sampling_params import SamplingParams

VOCAB, OPENER, PAGE = 50, 49, 64


class ScriptedFrontend(Frontend):
    """Messages whose content is token ids; an answer stands behind its opener, and a prompt ends with one."""

    def prepare_messages(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **_: Any
    ) -> PreparedPrompt:
        ids: list[int] = []
        boundaries, user_ends = [], []
        for count, message in enumerate(messages, 1):
            opener = [message.get("opener", OPENER)] if message["role"] == "assistant" else []
            ids += opener + list(message["content"])
            boundaries.append(Boundary(len(ids), count, BoundaryKind.MESSAGE))
            if message["role"] == "user":
                user_ends.append(len(ids))
        ids.append(OPENER)
        return PreparedPrompt(
            identity=make_identity(ids, rewrite_execution_frontiers=user_ends),
            boundaries=tuple(boundaries),
            generation_opener_frontier=len(ids) - 1,
            turn_closure_frontier=user_ends[-1] if user_ends else None,
            from_messages=True,
        )


class TickingClock:
    """Nanoseconds; every look costs a tick, so that no search is long and every run is the same."""

    def __init__(self, tick_ns: int = 1_000_000) -> None:
        self.now_ns, self.tick_ns = 1_000, tick_ns

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def open_engine(
    *,
    clock: Callable[[], int] | None = None,
    pages: int = 10,
    host_pages: int = 8,
    before_step: Callable[[str], None] | None = None,
    on_operation: Callable[[str], None] | None = None,
    copy_polls: int = 0,
    verify: bool = True,
    **options: Any,
) -> Engine:
    """An engine on a machine too small for what its requests leave behind."""
    settings = {
        "max_context": 256,
        "max_concurrency": 2,
        "prefill_chunk": 48,
        "device_state_slots": 2,
        "host_state_slots": 3,
        "max_private_continuations": 4,
        "max_shared_prefixes": 2,
    } | options
    resolved = resolve(make_engine_options(**settings), platform="cpu")
    frontend = ScriptedFrontend(
        source="fake",
        vocab_size=VOCAB,
        tokenizer=None,
        template=None,
        generation=GenerationConfig(frozenset(), {}),
        clock=lambda: datetime(2030, 1, 1),
    )
    capacity = CapacityVector(
        num_lanes=resolved.max_concurrency,
        max_context_tokens=resolved.max_context,
        num_state_slots=resolved.total_device_state_slots,
        state_image_bytes=4000,
        pools=(PoolCapacity(PoolKind.MAIN, pages, page_bytes=1000),),
        num_host_state_slots=resolved.cache.host_state_slots,
        host_kv_bytes=host_pages * 1000,
    )
    executor = FakeExecutor(
        capacity, vocab_size=VOCAB, verify=verify, before_step=before_step, copy_polls=copy_polls
    )
    program = Program(
        capacity,
        executor,
        prefill_chunk_tokens=resolved.prefill_chunk,
        memory=MemoryTable((), 0, 0),
        on_operation=on_operation,
    )
    facts = ModelFacts("fake", "0" * 8, 4, 1, False, VOCAB, "float32", "none")
    parts = EngineParts(options=resolved, frontend=frontend, program=program, model=facts)
    return Engine(parts, threaded=False, clock=clock or TickingClock())


def prompt_ids(engine: Engine, prompt: Any) -> list[int]:
    if isinstance(prompt[0], Mapping):
        return engine._parts.frontend.prepare_messages(prompt).identity.tokens.tolist()
    return list(prompt)


def solo(engine: Engine, prompt: Any, params: SamplingParams) -> list[int]:
    """What the request alone must draw, without pages, lanes or reuse."""
    lane = params.resolved({}).lane(eos_token_ids=frozenset(), default_seed=0)
    ids = prompt_ids(engine, prompt)
    count = min(params.max_tokens, engine.options.max_context - len(ids))
    return expected_tokens(np.asarray(ids), lane, count, VOCAB)


def drain(engine: Engine, each: Callable[[], None] = lambda: None, limit: int = 20_000) -> int:
    for count in range(limit):
        if not engine.step():
            return count
        each()
    raise AssertionError(f"still busy after {limit} boundaries")


@dataclass(frozen=True)
class _Seen:
    """What a published checkpoint was when it was first seen; it must never become anything else (C-4)."""

    frontier_tokens: int
    digest: int
    tokens: np.ndarray


class Watch:
    """Stands between worker and program and checks the invariants of requirements 17, each by its number."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.worker = engine._worker
        self.program: Program = engine._parts.program
        self.resources = self.program._resources
        self.manager = self.worker._manager
        self.checks = 0
        self.plans_used: dict[str, np.ndarray] = {}
        self._seen: dict[tuple, _Seen] = {}
        self._orders: dict[str, int] = {}
        self._moved: tuple = ()
        self._wrap()

    # -- between worker and program

    def _wrap(self) -> None:
        program, resources, scheduler = self.program, self.resources, self.worker._scheduler
        self._start = start = program.start
        advance, capture = program.advance_transition, program.start_capture
        install, begin, block = resources._install, scheduler.begin, scheduler.block

        def checked_install(state: Any, *args: Any, **kwargs: Any) -> None:
            # 5: every stage fits
            assert (used(state) <= state.capacity.units()).all(), "a stage exceeds the capacity"
            install(state, *args, **kwargs)

        def checked_start(plan: Any, problem: Any, target: Any, work: Any) -> None:
            assert plan.revision == program.resource_revision  # 9: bound to the revision
            if plan.source is not None:  # 6: exact, complete, covered
                assert program.verify(plan.source, work.identity)
            start(plan, problem, target, work)
            self.plans_used[plan.plan_id] = plan.used[-1]

        def checked_capture(plan: Any, problem: Any, target: Any, handle: Any) -> None:
            assert plan.revision == program.resource_revision  # 17: proved again at its frontier
            claim = self.manager.state.open_claim
            assert claim.plan.shared.gain_ns > 0  # 16: strictly better than the private baseline
            capture(plan, problem, target, handle)

        def checked_advance() -> Any:
            result = advance()
            if result is not None:
                assert not program.has_open_transition  # 11: complete and stable
                outcome = result.outcome
                expected = self.plans_used.pop(outcome.plan_id, None)
                if isinstance(outcome, Committed) and expected is not None:
                    # 4: the joint post-state that was planned; nobody else could allocate meanwhile (8)
                    assert used(resources.state).tolist() == expected.tolist()
            return result

        def checked_begin(request_id: Any) -> None:
            head = scheduler.waiting[0]  # 1: the head, or behind a blocked one under proof
            assert request_id == head or head in scheduler._blocked_at
            begin(request_id)

        def checked_block(request_id: Any, revision: int) -> None:
            self._fallback(self.worker._jobs[request_id])
            block(request_id, revision)

        program.start, program.advance_transition = checked_start, checked_advance
        program.start_capture, resources._install = checked_capture, checked_install
        scheduler.begin, scheduler.block = checked_begin, checked_block

    def _fallback(self, job: Any) -> None:
        """12: who is blocked would not even fit from root with everything unprotected released."""
        if self.worker._scheduler.waiting[0] != job.request_id:
            return  # refused for the head's sake
        problem = self.program.problem(job.work, [ROOT_CHOICE])
        targets = maximal_targets(problem)
        fits = bool(assess_numpy(problem, take(targets, slice(0, 1))).fits[0])
        assert not fits, f"request {job.request_id} was refused, but root fits once the cache is released"

    # -- after each boundary

    def check(self) -> None:
        """Everything that is observable at a stable boundary.

        Where neither side's topology has moved, as in ordinary decode, the books of what is inactive are
        looked at every sixteenth time only.
        """
        self.checks += 1
        program, resources, worker = self.program, self.resources, self.worker
        assert worker.failure is None, worker.failure  # 11: no adoption ever failed
        is_open = program.has_open_transition
        # 9: at most one, and both sides agree on it
        assert is_open == (self.manager.state.open_claim is not None) == worker._transitions.is_open
        moved = (program.resource_revision, is_open, self.manager.state.version)
        if moved == self._moved and self.checks % 16:
            return
        self._moved = moved
        program.check()  # 3, 5, 7: books, capacities, one writer, coverage
        state, logical = resources.state, self.manager.state
        self._occupancy(state)
        if not is_open:
            self._catalog(state, logical)
            self._contents(state)
        self._actives(logical)
        self._sessions(logical)

    def _occupancy(self, state: Any) -> None:
        """3: unique allocations and concrete reservations, counted one by one."""
        pages, granules = set(), set()
        for run in np.flatnonzero(state.run_pool != NO_POOL).tolist():
            length = int(state.run_pages[run])
            if state.run_device[run]:
                pages |= set(range(int(state.run_serial[run]), int(state.run_serial[run]) + length))
            if state.run_host_start[run] != NO_EXTENT:
                start = int(state.run_host_start[run])
                granules |= set(range(start, start + length))
        live = state.image_live
        occupancy = self.program.occupancy()
        assert occupancy["main_pages"] == len(pages) + int(state.owner_reserved_pages.sum())
        assert occupancy["host_kv_pages"] == len(granules)
        assert occupancy["state_slots"] == np.count_nonzero(state.image_device[live] != NO_SLOT)
        assert occupancy["host_state_slots"] == np.count_nonzero(state.image_host[live] != NO_SLOT)
        assert occupancy["lanes"] == worker_lanes(self.worker)
        assert occupancy["open_batches"] == 0

    def _catalog(self, state: Any, logical: Any) -> None:
        """2: the manager's catalog is exactly what the program holds, and every promise has its cell."""
        alive = {
            OwnerKey(OwnerId(o), int(state.owner_generation[o])): OwnerKind(int(state.owner_kind[o]))
            for o in np.flatnonzero(state.owner_kind != OwnerKind.FREE).tolist()
        }
        catalogued = {}
        for at, entry in entries(logical.catalog):
            assert at.kind is alive[entry.summary.owner_key]
            assert entry.summary == self.program.summary(entry.summary.owner)
            catalogued[entry.summary.owner_key] = entry
        actives = {record.summary.owner_key for record in logical.actives.values()}
        assert set(alive) == set(catalogued) | actives
        reserved = {cell.reserved_by for _, cell in cells(logical.catalog)} - {None}
        assert reserved == {r for r, record in logical.actives.items() if record.cell is not None}
        edges = {(int(a), int(o)) for a, o in zip(*np.nonzero(state.edges), strict=True)}
        assert edges == {
            (int(logical.actives[edge.request_id].summary.owner), int(edge.owner.owner))
            for edge in logical.edges
        }
        assert not state.owner_pins.any() and not state.open_transaction

    def _contents(self, state: Any) -> None:
        """6, 7: every published checkpoint still has the bytes that it was published with, on every tier."""
        executor: Any = self.program._executor
        alive = set()
        for owner in np.flatnonzero(state.owner_kind != OwnerKind.FREE).tolist():
            generation = int(state.owner_generation[owner])
            for row in checkpoints_of(state, OwnerId(owner)).tolist():
                frontier = int(state.checkpoint_frontier[row])
                key = (
                    owner,
                    generation,
                    int(state.checkpoint_kind[row]),
                    int(state.checkpoint_ordinal[row]),
                    frontier,
                )
                alive.add(key)
                if key not in self._seen:
                    known = self.resources._identities.known(owner, generation).identity
                    self._seen[key] = _seen(np.asarray(known.tokens[:frontier]))
                seen = self._seen[key]
                image = int(state.checkpoint_image[row])
                device, host = int(state.image_device[image]), int(state.image_host[image])
                held = []
                if device != NO_SLOT:
                    held.append((executor._digests[device], executor._covered[device]))
                if host != NO_SLOT:
                    held.append(executor._host_images[host])
                assert held and set(held) == {(seen.digest, frontier)}, f"{key} holds {held}"
                self._pages(state, owner, frontier, seen.tokens)
        self._seen = {key: seen for key, seen in self._seen.items() if key in alive}

    def _pages(self, state: Any, owner: int, frontier: int, tokens: np.ndarray) -> None:
        executor: Any = self.program._executor
        for run, start in space(state, OwnerId(owner), 0):
            begin, count = start * PAGE, int(state.run_pages[run])
            wanted = tokens[begin : min(frontier, begin + count * PAGE)]
            if not len(wanted):
                return
            if state.run_device[run]:
                pages = self.resources._books[0].pages_of(int(state.run_serial[run]), count)
                got = executor._pages[pages].reshape(-1, 2)[: len(wanted), 0]
                assert np.array_equal(got, wanted), f"owner {owner}: pages of run {run}"
            if state.run_host_start[run] != NO_EXTENT:
                at = int(state.run_host_start[run])
                got = executor._host_pages[at : at + count].reshape(-1, 2)[: len(wanted), 0]
                assert np.array_equal(got, wanted), f"owner {owner}: Host pages of run {run}"

    def _actives(self, logical: Any) -> None:
        """8: every active sequence keeps its whole entitlement until its terminal settlement."""
        for record in logical.actives.values():
            assert self.program.summary(record.summary.owner) == record.summary
            facts = self.program.facts(record.handle)
            need = -(-(record.facts.prompt_tokens + facts.work.max_output_tokens) // PAGE)
            assert len(facts.mapped_pages[0]) + facts.reserved_pages[0] == need

    def _sessions(self, logical: Any) -> None:
        """14: a binding accepts only a larger publication order."""
        for name, binding in logical.sessions.bindings.items():
            assert binding.order >= self._orders.get(name, -1)
            self._orders[name] = binding.order
            if binding.owner is not None and not self.program.has_open_transition:
                held = [e for _, e in entries(logical.catalog) if e.summary.owner_key == binding.owner]
                assert [(e.session, e.order) for e in held] == [(name, binding.order)]

    # -- things a test does on purpose

    def dry_run(self, prompt: Any, **arguments: Any) -> None:
        """2, 17: a plan that nobody starts changes and reserves nothing."""
        self.program.occupancy()
        before = self.resources.state, self.manager.state, self.program.resource_revision
        self.engine.plan(prompt, **arguments)
        after = self.resources.state, self.manager.state, self.program.resource_revision
        assert before[0] is after[0] and before[1] is after[1] and before[2] == after[2]

    def refuse_stale(self) -> bool:
        """10: a plan of another revision is refused without a trace; whether one could be made."""
        self.program.occupancy()
        work = RequestWork(make_identity([1, 2, 3]), 2, LaneSampling())
        problem = self.program.problem(work, [ROOT_CHOICE])
        target = take(identity_targets(problem), slice(0, 1))
        plan = seal(problem, target)
        if not isinstance(plan, ResourcePlan) or not self.program._lanes.num_free:
            return False
        old = replace(plan, revision=plan.revision - 1)
        before = self.resources.state, self.program.resource_revision
        try:
            self._start(old, problem, target, work)
        except (StalePlanError, ContractError):  # a transition may be open
            pass
        else:
            raise AssertionError("a stale plan was started")
        assert self.resources.state is before[0] and self.program.resource_revision == before[1]
        return True

    def close(self) -> None:
        """When idle nothing is reserved, pinned or promised, and all that is kept can go."""
        engine = self.engine
        self.check()
        stats = engine.stats()
        assert (stats["waiting"], stats["active"], stats["cache"]["edges"]) == (0, 0, 0)
        assert stats["cache"]["private"]["reserved"] == stats["cache"]["shared"]["reserved"] == 0
        for axis in ("lanes", "execution_rows", "open_batches", "main_pages_reserved"):
            assert stats["occupancy"][axis] == 0
        engine.clear_cache()
        self.check()
        assert not any(engine.stats()["occupancy"].values())


def worker_lanes(worker: Any) -> int:
    """Lanes of sequences: the materialising request has none yet."""
    return worker._scheduler.num_active - (worker._scheduler.materializing is not None)


def _seen(tokens: np.ndarray) -> _Seen:
    digest = 0
    for index, token in enumerate(tokens.tolist()):
        digest = mix(mix(digest, token), index)
    return _Seen(len(tokens), digest, tokens)
