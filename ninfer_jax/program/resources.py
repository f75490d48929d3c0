"""Owns the one `PhysicalState` and the page ids behind it, and carries out the one transition at a time.

Every change is a new state, installed whole once the copies it needs are done or queued; what fails before
that has changed nothing (X-9). It decides nothing: plans come sealed. It owns no sequence, no batch and no
buffer: the mover (the executor) moves bytes, and `program` runs the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ninfer_jax.errors import ContractError, InvariantError, PlanConsumedError, StalePlanError
from ninfer_jax.identity import PromptIdentity, prefix_of
from ninfer_jax.planner import operations
from ninfer_jax.planner.capacity import DEVICE_STATE, HOST_STATE, PhysicalCapacity, axis_names, ceil_div
from ninfer_jax.planner.holders import Holdings, make_holdings
from ninfer_jax.planner.ids import (
    NO_EXTENT,
    NO_SLOT,
    CheckpointId,
    CheckpointRef,
    Generation,
    OwnerId,
    OwnerKind,
    Revision,
    Tier,
)
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.plan import Aborted, Committed, ResourcePlan, is_stale
from ninfer_jax.planner.post_state import Activation, Copies, Transition, begin
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.rows import CheckpointSpec, settled
from ninfer_jax.planner.state import (
    PhysicalState,
    checkpoint_ref,
    checkpoints_of,
    is_valid,
    make_state,
    space,
    used,
)
from ninfer_jax.planner.target import TargetBatch
from ninfer_jax.program.executor import Mover, Transfer
from ninfer_jax.program.history import Segment, history_up_to
from ninfer_jax.program.identity_book import IdentityBook
from ninfer_jax.program.page_book import PageBook
from ninfer_jax.program.session_snapshot import (
    ContextContents,
    Dropped,
    place_context,
    saved_checkpoints,
)
from ninfer_jax.program.transaction import Effect, Event, Transaction, advance, open_transaction
from ninfer_jax.reuse import CheckpointSummary, OwnerKey, OwnerSummary


@dataclass(frozen=True)
class SharedCapture:
    """What a capture transition publishes at its end: a shared prefix of one active sequence."""

    owner: OwnerId
    spec: CheckpointSpec
    identity: PromptIdentity
    history: tuple[Segment, ...]
    tier: Tier


@dataclass(frozen=True)
class Landed:
    """The stable end of a transition (X-8)."""

    outcome: Committed | Aborted
    activation: Activation | None
    owners: tuple[OwnerSummary, ...]


@dataclass(eq=False)
class _Running:
    """The open transition: the value that says where it stands, and what is needed to go on."""

    plan: ResourcePlan
    transition: Transition
    identity: PromptIdentity | None  # of the sequence that a materialisation makes
    capture: SharedCapture | None
    transaction: Transaction
    touched: tuple[OwnerKey, ...]
    before: dict[OwnerKey, frozenset[CheckpointRef]]
    transfers: tuple[Transfer, ...] = ()
    undo: PhysicalState | None = None  # the state without what was taken and not published yet


class Resources:
    """The single holder of what is where; `program` is its only caller.

    Args:
        capacity: the capacity vector.
        mover: moves the bytes.
        on_operation: told the name of every reservation, copy and commit before it happens; tests raise
            from it.
    """

    def __init__(
        self,
        capacity: PhysicalCapacity,
        mover: Mover,
        *,
        on_operation: Callable[[str], None] | None = None,
    ) -> None:
        self.capacity = capacity
        self._mover = mover
        self._on_operation = on_operation or (lambda name: None)
        self._revision = 0
        self._begin()

    def reset(self) -> None:
        """Forgets everything (Q-7); the revision goes on."""
        self._begin()
        self._bump()

    def _begin(self) -> None:
        self._state = make_state(self.capacity, revision=self._revision)
        self._books = tuple(PageBook(pool.device_pages) for pool in self.capacity.pools)
        self._promised: dict[int, list[list[int]]] = {}  # by active owner: per pool, in logical order
        self._identities = IdentityBook()
        self._holdings: Holdings | None = None
        self._running: _Running | None = None
        self._consumed: weakref.WeakSet[ResourcePlan] = weakref.WeakSet()

    # -- what is there ---------------------------------------------------------------------------------------

    @property
    def state(self) -> PhysicalState:
        """The current state; stable unless a transaction is open."""
        return self._state

    @property
    def revision(self) -> int:
        """`resource_revision` (R-11)."""
        return self._revision

    @property
    def transaction(self) -> Transaction | None:
        """The open transaction, if any."""
        return None if self._running is None else self._running.transaction

    @property
    def holdings(self) -> Holdings:
        """Who holds what in the current state; made once, however many requests are planned on it."""
        if self._holdings is None or self._holdings.state is not self._state:
            self._holdings = make_holdings(self._state)
        return self._holdings

    def occupancy(self) -> dict[str, int]:
        """Returns used units per axis (R-4), and how much of it is promised growth."""
        units = dict(zip(axis_names(self.capacity), used(self._state).tolist(), strict=True))
        for pool, reserved in zip(
            self.capacity.pools, self._state.owner_reserved_pages.sum(0).tolist(), strict=True
        ):
            units[f"device_{pool.name}_pages_reserved"] = reserved
        return units

    def summary(self, owner: OwnerId) -> OwnerSummary:
        """Returns an owner with its checkpoints."""
        state = self._state
        generation = int(state.owner_generation[owner])
        checkpoints = [
            CheckpointSummary(
                checkpoint_ref(state, row),
                CheckpointId(int(row)),
                int(state.checkpoint_frontier[row]),
                self._identities.key(owner, generation, int(state.checkpoint_frontier[row])),
            )
            for row in checkpoints_of(state, owner)
        ]
        kind = OwnerKind(int(state.owner_kind[owner]))
        return OwnerSummary(owner, Generation(generation), kind, tuple(checkpoints))

    def find(self, ref: CheckpointRef) -> CheckpointId | None:
        """Returns the row of a checkpoint, or None if it is gone or its owner's row has a new occupant."""
        state = self._state
        if ref.owner >= state.num_owners or state.owner_generation[ref.owner] != ref.generation:
            return None
        for row in checkpoints_of(state, ref.owner):
            if checkpoint_ref(state, row) == ref:
                return CheckpointId(int(row))
        return None

    def verify(self, ref: CheckpointRef, identity: PromptIdentity) -> bool:
        """Returns whether a prompt may start from a checkpoint: alive, valid and exactly equal (C-1, C-5)."""
        row = self.find(ref)
        if row is None or not is_valid(self._state, row):
            return False
        frontier = int(self._state.checkpoint_frontier[row])
        return self._identities.matches(ref.owner, ref.generation, frontier, identity)

    def block_table(self, owner: OwnerId, pool: int = 0) -> list[int]:
        """Returns the page ids of an active sequence in logical order, promised growth included."""
        book, pages = self._books[pool], []
        for run, _ in space(self._state, owner, pool):
            pages += book.pages_of(int(self._state.run_serial[run]), int(self._state.run_pages[run]))
        return pages + self._promised[owner][pool]

    # -- the one transition ----------------------------------------------------------------------------------

    def start(
        self,
        plan: ResourcePlan,
        problem: Problem,
        target: TargetBatch,
        *,
        identity: PromptIdentity | None = None,
        capture: SharedCapture | None = None,
    ) -> None:
        """Opens the transition of a sealed plan; everything is checked again first (X-2).

        Args:
            plan, problem, target: what was planned, on the current state.
            identity: the prompt of the sequence to make; None for a capture.
            capture: what a capture publishes; None for a materialisation.
        Raises:
            PlanConsumedError: if the plan was started before.
            StalePlanError: if the state it was sealed against is no longer the current one, or it no longer
                fits; nothing changed.
            ContractError: if another transition is open (X-6).
        """
        if plan in self._consumed:
            raise PlanConsumedError(f"plan {plan.plan_id} was started before; a plan runs once")
        if self._running is not None:
            raise ContractError(f"plan {plan.plan_id}: transition {self._running.plan.plan_id} is still open")
        if is_stale(plan, self._revision) or problem.state is not self._state:
            raise StalePlanError(
                f"plan {plan.plan_id} is of revision {plan.revision}, the current one is {self._revision}; "
                "plan again"
            )
        self._check_claims(plan)
        try:
            transition, state = begin(problem, target)
        except ValueError as error:
            raise StalePlanError(f"plan {plan.plan_id} no longer fits: {error}") from error
        owners = [victim.owner for victim in plan.victims]
        owners += [] if plan.source is None else [plan.source.owner]
        touched = tuple(OwnerKey(o, Generation(int(state.owner_generation[o]))) for o in owners)
        before = {key: self.summary(key.owner).refs for key in touched}
        for key in touched:
            state = operations.set_pin(state, key.owner, pins=1)
        activates = capture is None
        restores = activates and bool(
            plan.source is not None and (transition.has_copies_in or transition.resolution.tail_copies)
        )
        transaction = open_transaction(plan.plan_id, restores=restores, copies_out=transition.has_copies_out)
        self._consumed.add(plan)
        self._install(replace(state, open_transaction=True))
        self._running = _Running(plan, transition, identity, capture, transaction, touched, before)

    def _check_claims(self, plan: ResourcePlan) -> None:
        for victim in plan.victims:
            if self._state.owner_generation[victim.owner] != victim.generation:
                raise StalePlanError(f"plan {plan.plan_id}: victim row {victim.owner} has another occupant")
        refs = [ref for victim in plan.victims for ref in victim.dropped]
        refs += [] if plan.source is None else [plan.source]
        for ref in refs:
            if self.find(ref) is None:
                raise StalePlanError(f"plan {plan.plan_id}: {ref} is gone")

    def cancel(self) -> None:
        """Asks the open transition to abort at its next stable boundary (Q-6)."""
        running = self._require_running()
        running.transaction, _ = advance(running.transaction, Event.CANCEL)

    def wait(self) -> None:
        """Sleeps until the copies in flight have arrived."""
        for transfer in self._require_running().transfers:
            transfer.wait()

    def step(self) -> Landed | None:
        """Carries the transition on until it ends or waits for copies.

        Returns:
            None while copies are in flight; else the stable end.
        """
        running = self._require_running()
        while running.transaction.is_open:
            event = Event.STEP
            if running.transaction.waits_for_copies:
                if not all(transfer.is_ready() for transfer in running.transfers):
                    return None
                event = Event.ARRIVED
            following, effects = advance(running.transaction, event)
            try:
                if event is Event.ARRIVED:
                    for transfer in running.transfers:
                        self._on_operation("land copy")
                        transfer.finish()
                landed = self._carry_out(running, effects)
            except (InvariantError, ContractError):
                raise
            except Exception as fault:
                running.transaction, _ = advance(running.transaction, Event.FAILED)
                return self._abort(running, f"{type(fault).__name__}: {fault}")
            running.transaction = following
            if landed is not None:
                return landed
        raise InvariantError(f"transition {running.plan.plan_id} ended without a result")

    def _carry_out(self, running: _Running, effects: tuple[Effect, ...]) -> Landed | None:
        transition, state = running.transition, self._state
        for effect in effects:
            state = self._state
            if effect is Effect.RELEASE:
                self._on_operation("release")
                self._install(transition.released(state))
            elif effect is Effect.COPY_OUT:
                self._on_operation("reserve host")
                prepared, copies = transition.prepared(state)
                running.undo = state
                self._install(prepared)
                running.transfers = self._copy_out(copies)
            elif effect is Effect.PUBLISH:
                self._on_operation("publish host")
                self._install(transition.published(state))
                running.undo, running.transfers = None, ()
            elif effect is Effect.RESTORE:
                self._on_operation("reserve device")
                restored, copies = transition.restored(state)
                running.undo = state
                self._install(restored, self._copy_in(copies))
            elif effect is Effect.COMMIT:
                self._on_operation("commit")
                return self._commit(running)
            else:
                return self._abort(running, "cancelled")
        return None

    def _copy_out(self, copies: Copies) -> tuple[Transfer, ...]:
        transfers = []
        for slot, host_slot in copies.images:
            self._on_operation("copy image out")
            transfers.append(self._mover.copy_image_out(slot, host_slot))
        for pool, serial, count, start in copies.pages:
            self._on_operation("copy pages out")
            pages = self._books[pool].pages_of(serial, count)
            transfers.append(self._mover.copy_pages_out(pages, range(start, start + count)))
        return tuple(transfers)

    def _copy_in(self, copies: Copies) -> list[tuple[int, int, int]]:
        """Queues the copies to Device; returns (pool, serial, page) of the pages that they filled."""
        named: list[tuple[int, int, int]] = []
        try:
            for pool, serial, count, start in copies.pages:
                pages = self._books[pool].take(count)
                named += [(pool, serial + i, page) for i, page in enumerate(pages)]
                self._on_operation("copy pages in")
                self._mover.copy_pages_in(range(start, start + count), pages)
            for host_slot, slot in copies.images:
                self._on_operation("copy image in")
                self._mover.copy_image_in(host_slot, slot)
        except BaseException:
            for pool, _, page in named:
                self._books[pool].give_back([page])
            raise
        return named

    def _commit(self, running: _Running) -> Landed:
        if running.capture is not None:
            owner = self._publish_shared(running.capture)
            return self._close(running, extra=(running.capture.owner, owner))
        state, activation = running.transition.activated(self._state)
        state = _settled_at(state, self._revision)
        names: list[tuple[int, int, int]] = []
        try:
            for tail in activation.tails:  # beside the source, which must outlive a failure: X-4
                book = self._books[tail.pool]
                (page,) = book.take(1)
                names.append((tail.pool, tail.serial, page))
                self._on_operation("copy tail")
                if tail.host_start == NO_EXTENT:
                    self._mover.copy_page(book.pages_of(tail.source_serial, 1)[0], page)
                else:
                    self._mover.copy_pages_in([tail.host_start], [page])
            if activation.image_from_host is not None:
                self._on_operation("copy image in")
                self._mover.copy_image_in(activation.image_from_host, activation.write_slot)
            self._on_operation("reserve growth")
            history: tuple[Segment, ...] = ()
            if running.plan.source is not None:
                source = self._identities.known(running.plan.source.owner, running.plan.source.generation)
                history = history_up_to(source.history, running.plan.reused_tokens)
        except BaseException:
            for pool, _, page in names:
                self._books[pool].give_back([page])
            raise
        self._install(state, names)  # what a consumed source gives up may be growth at once
        reserved = state.owner_reserved_pages[activation.owner].tolist()
        self._promised[activation.owner] = [b.take(n) for b, n in zip(self._books, reserved, strict=True)]
        running.undo = None
        assert running.identity is not None, "a materialisation has a prompt"
        self.remember(activation.owner, running.identity, history)
        return self._close(running, activation=activation, extra=(activation.owner,))

    def _abort(self, running: _Running, reason: str) -> Landed:
        if running.undo is not None:
            self._install(running.undo)
        return self._close(running, aborted_because=reason)

    def _close(
        self,
        running: _Running,
        *,
        activation: Activation | None = None,
        aborted_because: str | None = None,
        extra: tuple[OwnerId, ...] = (),
    ) -> Landed:
        """Ends the transition: pins go, the revision moves once, and what is true now is said (X-7, X-8)."""
        state = replace(self._state, open_transaction=False)
        alive = [key for key in running.touched if self.is_alive(key)]
        for key in alive:
            state = operations.set_pin(state, key.owner, pins=0)
        self._install(state)
        self._running = None
        self._bump()
        deleted: list[CheckpointRef] = []
        for key, refs in running.before.items():
            now = self.summary(key.owner).refs if key in alive else frozenset()
            deleted += refs - now
        evicted = tuple(key.owner for key in running.touched if key not in alive)
        consumed = running.plan.source
        if activation is not None and consumed is not None and consumed.owner in evicted:
            evicted = tuple(o for o in evicted if o != consumed.owner)  # it became the sequence
            problem = running.transition.problem
            released = {checkpoint_ref(problem.state, c) for c in running.transition.resolution.released}
            deleted = [ref for ref in deleted if ref.owner != consumed.owner or ref in released]
        revision = Revision(self._revision)
        outcome: Committed | Aborted
        plan_id, gone = running.plan.plan_id, tuple(sorted(deleted))
        if aborted_because is None:
            owner = None if activation is None else activation.owner
            outcome = Committed(plan_id, revision, owner, gone, evicted)
        else:
            outcome = Aborted(plan_id, revision, aborted_because, gone, evicted)
        said = dict.fromkeys((*(key.owner for key in alive), *extra))
        return Landed(outcome, activation, tuple(self.summary(o) for o in said))

    # -- sequences -------------------------------------------------------------------------------------------

    def remember(self, owner: OwnerId, identity: PromptIdentity, history: Sequence[Segment]) -> None:
        """Sets the tokens of an owner and how they were executed, so that its checkpoints can be named."""
        self._identities.learn(owner, int(self._state.owner_generation[owner]), identity, history)

    def history(self, owner: OwnerId) -> tuple[Segment, ...]:
        """Returns the steps that an owner's tokens were executed in."""
        return self._identities.known(owner, int(self._state.owner_generation[owner])).history

    def advance_to(self, owner: OwnerId, frontier_tokens: int) -> None:
        """Brings the state up to an active sequence's committed frontier; the revision stays (R-11)."""
        before = self._state
        is_settled = before.owner_reads[owner] == before.owner_writes[owner]
        if is_settled and int(before.owner_frontier[owner, 0]) == frontier_tokens:
            return
        state = operations.advance(before, owner, frontier_tokens)
        names = []
        for pool, promised in enumerate(self._promised[owner]):
            grown = int(before.owner_reserved_pages[owner, pool] - state.owner_reserved_pages[owner, pool])
            mapped = ceil_div(frontier_tokens, self.capacity.page_tokens) - grown
            serial = int(state.owner_serial[owner, pool]) + mapped
            names += [(pool, serial + i, page) for i, page in enumerate(promised[:grown])]
            del promised[:grown]
        self._install(replace(state, revision=self._revision), names)

    def capture_private(
        self, owner: OwnerId, spec: CheckpointSpec, *, replaces: CheckpointRef | None = None
    ) -> bool:
        """Takes a checkpoint of an active sequence at its frontier, if a state slot is free (A-6, K-5).

        Args:
            owner: brought up to `spec.frontier_tokens` before.
            spec: what to publish.
            replaces: a checkpoint of the same lineage that goes in exchange.
        Returns:
            Whether it was taken; else nothing changed.
        """
        state = self._state
        if replaces is not None:
            row = self.find(replaces)
            if row is None:
                return False
            state = operations.drop_checkpoint(state, row)
        free = state.capacity.units() - used(state)
        if free[DEVICE_STATE] > 0:
            tier = Tier.DEVICE
        elif free[HOST_STATE] > 0:
            tier = Tier.HOST
        else:
            return False
        state, _ = operations.capture(state, owner, spec, shared=False, state_tier=tier)
        self._on_operation("capture")
        self._copy_captured(state, owner, owner, spec)
        self._install(_settled_at(state, self._revision))
        self._bump()
        return True

    def _copy_captured(
        self, state: PhysicalState, owner: OwnerId, holder: OwnerId, spec: CheckpointSpec
    ) -> None:
        """Copies the image that a sequence writes into the one that its new checkpoint got."""
        (row,) = (
            r
            for r in checkpoints_of(state, holder)
            if state.checkpoint_kind[r] == spec.kind and state.checkpoint_ordinal[r] == spec.ordinal
        )
        image = int(state.checkpoint_image[row])
        source = int(state.image_device[state.owner_writes[owner]])
        if state.image_device[image] != NO_SLOT:
            self._mover.copy_image(source, int(state.image_device[image]))
        else:
            self._mover.copy_image_out(source, int(state.image_host[image])).finish()

    def _publish_shared(self, capture: SharedCapture) -> OwnerId:
        before, owner = self._state, capture.owner
        state, holder = operations.capture(before, owner, capture.spec, shared=True, state_tier=capture.tier)
        self._copy_captured(state, owner, holder, capture.spec)
        names: list[tuple[int, int, int]] = []
        try:
            for pool, book in enumerate(self._books):
                if int(state.owner_frontier[owner, pool]) % self.capacity.page_tokens:
                    run = space(before, owner, pool)[-1][0]
                    last = int(before.run_serial[run]) + int(before.run_pages[run]) - 1
                    (page,) = book.take(1)
                    names.append((pool, int(state.run_serial[space(state, owner, pool)[-1][0]]), page))
                    self._on_operation("copy tail")
                    self._mover.copy_page(book.pages_of(last, 1)[0], page)
        except BaseException:
            for pool, _, page in names:
                self._books[pool].give_back([page])
            raise
        self._install(_settled_at(state, self._revision), names)
        self.remember(holder, capture.identity, capture.history)
        return holder

    def finish(
        self,
        owner: OwnerId,
        spec: CheckpointSpec,
        identity: PromptIdentity,
        history: Sequence[Segment],
    ) -> None:
        """Publishes an active sequence as a private continuation; its unused reservation is free (A-5).

        A checkpoint at the endpoint's own frontier goes: it would be the same image twice.
        """
        self._require_quiet()
        state = self._state
        for row in checkpoints_of(state, owner):
            if int(state.checkpoint_frontier[row]) == spec.frontier_tokens:
                state = operations.drop_checkpoint(state, CheckpointId(int(row)))
        state = operations.finish(state, owner, spec)
        self._release_promised(owner)
        self._install(_settled_at(state, self._revision))
        self.remember(owner, identity, history)
        self._bump()

    def release(self, owner: OwnerId) -> None:
        """Releases an owner whole: Discard of an active sequence, or eviction of an inactive one."""
        self._require_quiet()
        state = operations.evict(self._state, owner)
        self._release_promised(owner)
        self._install(_settled_at(state, self._revision))
        self._bump()

    def _release_promised(self, owner: OwnerId) -> None:
        for book, pages in zip(self._books, self._promised.pop(owner, []), strict=False):
            book.give_back(pages)

    # -- sessions --------------------------------------------------------------------------------------------

    def read_contents(self, owner: OwnerId) -> Callable[[], ContextContents]:
        """Starts to read an inactive context whole; reading changes nothing (PER-02).

        Returns:
            A function that waits for the bytes, from any thread, whatever happens to the context meanwhile.
        """
        self._require_quiet()
        state, mover = self._state, self._mover
        known = self._identities.known(owner, int(state.owner_generation[owner]))
        saved, images = saved_checkpoints(state, owner)
        end = max(checkpoint.frontier_tokens for checkpoint in saved)
        pages = []
        for run, _ in space(state, owner, 0):
            count = int(state.run_pages[run])
            if state.run_device[run]:
                pages.append(mover.read_pages(self._books[0].pages_of(int(state.run_serial[run]), count)))
            else:
                start = int(state.run_host_start[run])
                pages.append(mover.read_host_pages(range(start, start + count)))
        leaves = [
            mover.read_image(int(state.image_device[image]))
            if state.image_device[image] != NO_SLOT
            else mover.read_host_image(int(state.image_host[image]))
            for image in images
        ]
        return lambda: ContextContents(
            identity=prefix_of(known.identity, end),
            history=history_up_to(known.history, end),
            checkpoints=tuple(saved),
            images=tuple(tuple(read()) for read in leaves),
            pages=np.concatenate([read() for read in pages]),
        )

    def adopt_contents(
        self, contents: ContextContents, *, max_long_anchors: int
    ) -> tuple[OwnerSummary, tuple[Dropped, ...]] | str:
        """Returns the new private owner of a restored context and what was dropped, or why it does not fit.

        Its bytes are written before the state that names them is installed.
        """
        self._require_quiet()
        placed = place_context(self._state, contents.checkpoints, max_long_anchors=max_long_anchors)
        if isinstance(placed, str):
            return placed
        state, book, names, done = placed.state, self._books[0], [], 0
        taken: list[int] = []
        try:
            for run, _ in space(state, placed.owner, 0):
                count = int(state.run_pages[run])
                part = contents.pages[done : done + count]
                done += count
                if state.run_device[run]:
                    pages = book.take(count)
                    taken += pages
                    serial = int(state.run_serial[run])
                    names += [(0, serial + i, page) for i, page in enumerate(pages)]
                    self._mover.write_pages(part, pages)
                else:
                    start = int(state.run_host_start[run])
                    self._mover.write_host_pages(part, range(start, start + count))
            for image, slot, host_slot in placed.images:
                if slot >= 0:
                    self._mover.write_image(contents.images[image], slot)
                else:
                    self._mover.write_host_image(contents.images[image], host_slot)
        except BaseException:
            book.give_back(taken)
            raise
        self._install(replace(state, revision=self._revision), names)
        self.remember(placed.owner, contents.identity, contents.history)
        self._bump()
        return self.summary(placed.owner), placed.dropped

    # -- installing ------------------------------------------------------------------------------------------

    def _install(self, state: PhysicalState, names: Iterable[tuple[int, int, int]] = ()) -> None:
        """Makes a state the current one; frees the pages of names that it no longer has on Device.

        Args:
            names: (pool, serial, page) of names that are new on Device.
        """
        for pool, book in enumerate(self._books):
            old, new = _on_device(self._state, pool), _on_device(state, pool)
            gone = _expanded(old - new) - _expanded(new - old)
            for where, serial, page in names:
                if where == pool:
                    book.name(serial, page)
            book.forget(sorted(gone))
        alive = state.owner_kind != OwnerKind.FREE
        keys = {(int(o), int(state.owner_generation[o])) for o in np.flatnonzero(alive)}
        self._state = replace(state, revision=self._revision)
        self._identities.keep_only(keys)

    def _bump(self) -> None:
        self._revision += 1
        self._state = replace(self._state, revision=self._revision)

    def is_alive(self, key: OwnerKey) -> bool:
        """Returns whether an owner row still has the same occupant."""
        state = self._state
        return (
            state.owner_kind[key.owner] != OwnerKind.FREE
            and int(state.owner_generation[key.owner]) == key.generation
        )

    def _require_running(self) -> _Running:
        if self._running is None:
            raise ContractError("no transition is open")
        return self._running

    def _require_quiet(self) -> None:
        if self._running is not None:
            raise ContractError(
                f"transition {self._running.plan.plan_id} is open; settle it before another one (X-6)"
            )

    def check(self) -> None:
        """Recounts everything from the objects (R-4, R-7); for tests and a debug option.

        Raises:
            InvariantError: naming what disagrees.
        """
        state = self._state
        try:
            check_invariants(state)
        except ValueError as error:
            raise InvariantError(str(error)) from error
        for pool, book in enumerate(self._books):
            promised = [page for pages in self._promised.values() for page in pages[pool]]
            book.check(_expanded(_on_device(state, pool)), promised)
        for owner, pages in self._promised.items():
            for pool, ids in enumerate(pages):
                if len(ids) != int(state.owner_reserved_pages[owner, pool]):
                    raise InvariantError(
                        f"owner {owner} was promised {len(ids)} pages of pool {pool}, "
                        f"reserved are {int(state.owner_reserved_pages[owner, pool])}"
                    )
        if self._running is None and (state.owner_pins.any() or state.open_transaction):
            raise InvariantError("pins or an open transaction are left behind")


def _settled_at(state: PhysicalState, revision: int) -> PhysicalState:
    """Returns the collected state, checked against the capacity, at a revision of the caller's."""
    return replace(settled(state), revision=revision)


def _on_device(state: PhysicalState, pool: int) -> set[tuple[int, int]]:
    rows = np.flatnonzero((state.run_pool == pool) & state.run_device)
    return set(zip(state.run_serial[rows].tolist(), state.run_pages[rows].tolist(), strict=True))


def _expanded(runs: set[tuple[int, int]]) -> set[int]:
    return {serial + i for serial, pages in runs for i in range(pages)}
