"""Transitions over the real books: what moves, what is shared, what an abort leaves (X-1..X-9, K-5).

The model-free executor proves in every step that pages and state hold the history; after every transition the
books are recounted from the objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import pytest

from ninfer_jax.errors import ContractError, PlanConsumedError, StaleHandleError, StalePlanError
from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.ids import NO_EXTENT, NO_POOL, NO_SLOT, CheckpointKind, CheckpointRef, OwnerKind
from ninfer_jax.planner.options import Extent, ReplicaAction, Survivors, Template
from ninfer_jax.planner.plan import Aborted, Committed, Readiness, ResourcePlan
from ninfer_jax.planner.problem import identity_targets, maximal_targets
from ninfer_jax.planner.target import make_targets
from ninfer_jax.planner.transition import one_target, seal
from ninfer_jax.program.fake import expected_tokens
from ninfer_jax.program.program import Program
from ninfer_jax.program.transaction import Phase
from ninfer_jax.request import SequenceHandle
from ninfer_jax.reuse import ROOT_CHOICE, OwnerSummary, SourceChoice, TransitionResult

VOCAB = 50
ENDPOINT, CLOSURE, ANCHOR = (
    CheckpointKind.SESSION_ENDPOINT,
    CheckpointKind.TURN_CLOSURE,
    CheckpointKind.LONG_ANCHOR,
)
CONSUME, RETAIN = Disposition.CONSUME, Disposition.RETAIN
DEMOTE = ReplicaAction.DEMOTE
DEMOTE_ALL = Template(Survivors.ALL, state=DEMOTE, kv=DEMOTE)
DEMOTE_KV = Template(Survivors.ALL, kv=DEMOTE)
DEMOTE_STATE = Template(Survivors.ALL, state=DEMOTE)
DEMOTE_TAIL = Template(Survivors.ALL, kv=DEMOTE, kv_extent=Extent.SIZED)


def text(num_tokens, start=3):
    return [(7 * index + start) % VOCAB for index in range(num_tokens)]


def recount(program: Program) -> dict[str, int]:
    """Used units, counted one by one from the objects and reservations of the state (R-4, R-5)."""
    state = program._resources.state
    live = np.flatnonzero(state.image_live)
    device, host = set(), set()
    for run in np.flatnonzero(state.run_pool != NO_POOL).tolist():
        pages = int(state.run_pages[run])
        if state.run_device[run]:
            device |= {int(state.run_serial[run]) + i for i in range(pages)}
        if state.run_host_start[run] != NO_EXTENT:
            host |= {int(state.run_host_start[run]) + i for i in range(pages)}
    return {
        "state_slots": len({int(state.image_device[i]) for i in live if state.image_device[i] != NO_SLOT}),
        "host_state_slots": len({int(state.image_host[i]) for i in live if state.image_host[i] != NO_SLOT}),
        "host_kv_pages": len(host),
        "main_pages": len(device) + int(state.owner_reserved_pages.sum()),
    }


@dataclass
class Lab:
    """One program, and short ways to bring it where a test begins."""

    build: object
    program: Program
    log: list[str] = field(default_factory=list)
    trace: tuple[Phase, ...] = ()

    def check(self) -> None:
        self.program.check()
        occupancy = self.program.occupancy()
        assert {axis: occupancy[axis] for axis in recount(self.program)} == recount(self.program)

    def work(self, tokens, output, **settings):
        return self.build.work(text(tokens) if isinstance(tokens, int) else tokens, output, **settings)

    # -- sequences

    def feed(self, handle: SequenceHandle, captures=None) -> None:
        """The prompt and the first token; captures by frontier."""
        while (pending := self.program.prefill(handle)) is None:
            self._capture(handle, captures)
        self.program.commit(pending, [1])
        self._capture(handle, captures)

    def _capture(self, handle, captures):
        kind = (captures or {}).get(self.program.frontier_tokens(handle))
        if kind is not None:
            result = self.program.capture_private(handle, kind, ordinal=1 if kind is ANCHOR else 0)
            assert isinstance(result.outcome, Committed)
            self.check()

    def decode(self, handle: SequenceHandle, count: int) -> None:
        for _ in range(count):
            self.program.commit(self.program.decode([handle]), [1])

    def output(self, handle: SequenceHandle) -> list[int]:
        facts = self.program.facts(handle)
        return list(facts.ledger_tokens[len(facts.work.identity.tokens) :])

    def answer(self, handle: SequenceHandle, captures=None) -> list[int]:
        """The whole output; it must be that of a solo run."""
        work = self.program.facts(handle).work
        self.feed(handle, captures)
        self.decode(handle, work.max_output_tokens - 1)
        got = self.output(handle)
        assert got == expected_tokens(work.identity.tokens, work.sampling, len(got), VOCAB)
        self.check()
        return got

    def publish(self, handle: SequenceHandle) -> OwnerSummary:
        self.program.terminate(handle)
        (owner,) = self.program.finish(handle).owners
        self.check()
        return owner

    def drop(self, handle: SequenceHandle) -> None:
        self.program.terminate(handle)
        self.program.discard(handle)
        self.check()

    def keep(self, tokens, output=1, captures=None) -> OwnerSummary:
        """A finished conversation; its frontier is the prompt and all output but the last token."""
        work = replace(self.work(tokens, output), capture_frontiers=tuple(captures or ()))
        handle = self.program.activate(work)
        self.answer(handle, captures)
        return self.publish(handle)

    # -- transitions

    def plan(self, work, ref=None, disposition=RETAIN, *, codes=None, maximal=False):
        choices = [ROOT_CHOICE] if ref is None else [ROOT_CHOICE, SourceChoice(ref, disposition)]
        problem = self.program.problem(work, choices)
        target = one_target((maximal_targets if maximal else identity_targets)(problem), len(choices) - 1)
        if codes:
            row = target.codes[0].copy()
            for owner, template in codes.items():
                row[problem.victims.tolist().index(owner)] = problem.options.templates.index(template)
            target = make_targets(target.candidate, row)
        plan = seal(problem, target)
        return plan, problem, target, work

    def begin(self, work, ref=None, disposition=RETAIN, **how) -> ResourcePlan:
        planned = self.plan(work, ref, disposition, **how)
        assert isinstance(planned[0], ResourcePlan), planned[0]
        self.program.start(*planned)
        return planned[0]

    def settle(self) -> TransitionResult:
        running = self.program._resources._running
        while (result := self.program.advance_transition()) is None:
            self.program.wait_for_copies()
        self.trace = running.transaction.trace
        self.check()
        return result

    def enter(self, work, ref=None, disposition=RETAIN, **how) -> SequenceHandle:
        self.begin(work, ref, disposition, **how)
        result = self.settle()
        assert isinstance(result.outcome, Committed), result.outcome
        return result.active

    def demote(self, owner: OwnerSummary, template: Template = DEMOTE_ALL, need=1) -> None:
        """Puts an owner under the pressure of a short request that then goes."""
        self.drop(self.enter(self.work(text(5, 1), need), codes={owner.owner: template}))

    def tiers(self, owner: OwnerSummary) -> tuple[set, set]:
        """Where the owner's images and runs are."""
        state = self.program._resources.state
        rows = [int(c.row) for c in owner.checkpoints]
        images = {
            (bool(state.image_device[i] != NO_SLOT), bool(state.image_host[i] != NO_SLOT))
            for i in state.checkpoint_image[rows]
        }
        runs = state.space_run[state.space_owner == owner.owner]
        return images, {(bool(state.run_device[r]), bool(state.run_host_start[r] != NO_EXTENT)) for r in runs}


@pytest.fixture
def lab(build):
    def make(**settings) -> Lab:
        log: list[str] = []
        settings = {"extra_state_slots": 4, "host_state_slots": 4, "host_pages": 12} | settings
        return Lab(build, build.program(on_operation=log.append, **settings), log)

    return make


def ref_of(owner: OwnerSummary, kind=ENDPOINT) -> CheckpointRef:
    (ref,) = (c.ref for c in owner.checkpoints if c.ref.kind is kind)
    return ref


# -- OCC-01, OCC-02


def test_pages_of_several_spaces_count_once_and_conversion_adds_none(lab):
    lab = lab(num_pages=12)
    x = lab.keep(130)
    assert lab.program.occupancy()["main_pages"] == 3
    y = lab.enter(lab.work(200, 100), ref_of(x))
    revision = lab.program.resource_revision
    assert lab.program.occupancy()["main_pages"] == 6  # a, b, c, d and two of growth; references would be 8
    assert lab.program.occupancy()["main_pages_reserved"] == 2
    lab.feed(y)  # past token 192
    assert lab.program.occupancy()["main_pages"] == 6
    assert lab.program.occupancy()["main_pages_reserved"] == 1
    assert lab.program.resource_revision == revision
    lab.check()


# -- every way to start from a checkpoint


@pytest.mark.parametrize("disposition", [CONSUME, RETAIN])
@pytest.mark.parametrize("where", [None, DEMOTE_ALL, DEMOTE_KV, DEMOTE_STATE, DEMOTE_TAIL])
@pytest.mark.parametrize("kind", [ENDPOINT, CLOSURE, ANCHOR])
@pytest.mark.parametrize("frontiers", [(64, 128, 192), (70, 100, 130)])  # aligned, and inside one tail page
def test_every_restore_path_answers_like_a_solo_run(lab, frontiers, kind, where, disposition):
    lab = lab(num_pages=12, max_context_tokens=800)
    anchor, closure, end = frontiers
    x = lab.keep(end, captures={anchor: ANCHOR, closure: CLOSURE})
    if where is not None:
        lab.demote(x, where, need=1 if where is not DEMOTE_TAIL else 64 * 11 - 5)
    base = {ENDPOINT: end, CLOSURE: closure, ANCHOR: anchor}[kind]
    handle = lab.enter(lab.work(text(base) + text(80, 9), 20), ref_of(x, kind), disposition)
    assert lab.program.frontier_tokens(handle) == base
    lab.answer(handle)
    again = lab.publish(handle)
    kinds = [c.ref.kind for c in again.checkpoints]
    if disposition is RETAIN:
        assert kinds == [ENDPOINT]
        assert lab.program.summary(x.owner) == x  # untouched, still there
        assert all(lab.program.verify(c.ref, lab.work(end, 1).identity) for c in x.checkpoints)
    else:
        survivors = {ENDPOINT: [ANCHOR, CLOSURE], CLOSURE: [ANCHOR, CLOSURE], ANCHOR: [ANCHOR]}[kind]
        assert kinds == [*survivors, ENDPOINT]
        with pytest.raises(StaleHandleError):
            lab.program.evict(x.owner_key)
    # everything that is left still serves
    for c in again.checkpoints:
        tokens = [*lab.program._resources._identities.known(again.owner, again.generation).identity.tokens]
        more = lab.enter(lab.work(tokens[: c.frontier_tokens] + text(3, 1), 2), c.ref)
        lab.answer(more)
        lab.drop(more)
    for owner in {again.owner_key} | ({x.owner_key} if disposition is RETAIN else set()):
        lab.program.evict(owner)
    lab.check()
    assert set(lab.program.occupancy().values()) == {0}


def test_a_move_copies_nothing(lab):  # R-9, S-2
    lab = lab()
    x = lab.keep(128)
    lab.log.clear()
    slots = lab.program.occupancy()["state_slots"]
    handle = lab.enter(lab.work([*text(128), 1], 2), ref_of(x), CONSUME)
    assert not [name for name in lab.log if "copy" in name]
    assert lab.program.occupancy()["state_slots"] == slots
    lab.answer(handle)


def test_a_fork_borrows_its_source_until_the_first_step(lab):  # S-3, S-4
    lab = lab()
    x = lab.keep(128)
    handle = lab.enter(lab.work([*text(128), 1], 2), ref_of(x))
    state = lab.program._resources.state
    row = int(x.checkpoints[0].row)
    assert state.image_pins[state.checkpoint_image[row]] == 1
    with pytest.raises(ContractError, match="read by an active sequence"):
        lab.program.evict(x.owner_key)
    lab.feed(handle)
    lab.check()
    state = lab.program._resources.state
    assert state.image_pins[state.checkpoint_image[row]] == 0
    with pytest.raises(ContractError):  # the edge holds until the terminal settlement (D-3)
        lab.program.evict(x.owner_key)
    lab.drop(handle)
    lab.program.evict(x.owner_key)
    assert set(lab.program.occupancy().values()) == {0}


@pytest.mark.parametrize("disposition", [CONSUME, RETAIN])
@pytest.mark.parametrize("length", [128, 100])
def test_a_prompt_that_a_checkpoint_covers_whole_runs_no_chunk(lab, length, disposition):
    lab = lab()
    x = lab.keep(length)
    steps = []
    lab.program._executor.before_step = steps.append
    handle = lab.enter(lab.work(length, 5), ref_of(x), disposition)
    lab.answer(handle)
    assert "prefill" not in steps
    lab.publish(handle)


# -- Host, both ways


def test_host_space_comes_back_when_its_owner_is_restored_or_goes(lab):
    lab = lab(num_pages=12)
    x = lab.keep(150, captures={100: CLOSURE})
    lab.demote(x)
    assert lab.tiers(x) == ({(False, True)}, {(False, True)})
    assert lab.program.occupancy()["host_kv_pages"] == 3 and lab.program.occupancy()["main_pages"] == 0
    handle = lab.enter(lab.work([*text(150), 1], 2), ref_of(x), CONSUME)
    lab.answer(handle)
    y = lab.publish(handle)
    lab.program.evict(y.owner_key)
    lab.check()
    assert set(lab.program.occupancy().values()) == {0}


def test_three_round_trips_through_host(lab):
    lab = lab(num_pages=12)
    x = lab.keep(150)
    tokens = text(150)
    for turn in range(3):
        lab.demote(x)
        tokens = tokens + text(20, turn)
        handle = lab.enter(lab.work(tokens, 6), ref_of(x), CONSUME)
        tokens = tokens + lab.answer(handle)[:-1]
        x = lab.publish(handle)
    assert lab.program.occupancy()["host_kv_pages"] == 0


def test_a_restore_reserves_copies_and_publishes_before_it_releases(lab):  # TX-12, X-4
    lab = lab(num_pages=12)
    x = lab.keep(150)
    lab.demote(x)
    lab.log.clear()
    held = []
    lab.program._executor.before_step = lambda step: held.append(
        (step, lab.program.occupancy()["host_kv_pages"])
    )
    lab.enter(lab.work([*text(150), 1], 2), ref_of(x), CONSUME)
    assert [name for name, _ in groupby(lab.log)] == [
        "release",
        "reserve device",
        "copy pages in",
        "copy image in",
        "commit",
        "reserve growth",
    ]
    assert lab.trace[-2:] == (Phase.RESTORE, Phase.COMMITTED)
    assert [row for row in held if row[0] == "copy"] == [("copy", 3)] * 3
    assert lab.program.occupancy()["host_kv_pages"] == 0


def test_host_only_is_valid_but_not_device_ready(lab):  # ID-07
    lab = lab(num_pages=12)
    x = lab.keep(150)
    lab.demote(x)
    work = lab.work([*text(150), 1], 2)
    assert lab.program.verify(ref_of(x), work.identity)
    plan, *_ = lab.plan(work, ref_of(x), CONSUME)
    assert plan.readiness is Readiness.NEEDS_TRANSFER
    y = lab.keep(text(150, 8))
    plan, *_ = lab.plan(lab.work([*text(150, 8), 1], 2), ref_of(y), CONSUME)
    assert plan.readiness is Readiness.READY


def test_pages_without_a_state_image_are_no_hit(lab):  # ID-05
    lab = lab()
    x = lab.keep(256)
    handle = lab.enter(lab.work(text(256) + text(40, 1), 1), ref_of(x))
    lab.answer(handle)
    y = lab.publish(handle)
    lab.program.evict(x.owner_key)  # its image goes, its pages live on in the branch
    assert lab.program.occupancy()["main_pages"] == 5
    identity = lab.work([*text(256), 1], 1).identity
    assert not lab.program.verify(ref_of(x), identity)
    assert not any(lab.program.verify(c.ref, identity) for c in y.checkpoints)
    with pytest.raises(StaleHandleError):
        lab.program.problem(lab.work(256, 1), [ROOT_CHOICE, SourceChoice(ref_of(x), RETAIN)])


# -- shared captures


@pytest.mark.parametrize("length", [128, 100])
def test_a_shared_capture_keeps_the_tail_and_copies_one_page(lab, length):  # K-5, MV-05
    lab = lab()
    prompt = text(length) + text(60, 11)
    handle = lab.program.activate(lab.work(prompt, 30, frontiers=(length,)))
    assert lab.program.prefill(handle) is None
    before = lab.program.occupancy()
    problem = lab.program.capture_problem(handle)
    target = one_target(identity_targets(problem), 0)
    lab.log.clear()
    lab.program.start_capture(seal(problem, target), problem, target, handle)
    result = lab.settle()
    shared = next(o for o in result.owners if o.kind is OwnerKind.SHARED)
    after = lab.program.occupancy()
    assert after["state_slots"] == before["state_slots"] + 1
    assert after["main_pages"] == before["main_pages"] + (1 if length % 64 else 0)
    lab.answer(handle)
    ref = ref_of(shared, CheckpointKind.SHARED_STABLE_PREFIX)
    reader = lab.enter(lab.work(text(length) + text(30, 1), 4), ref)
    lab.answer(reader)
    lab.publish(reader)
    lab.publish(handle)
    assert lab.program.summary(shared.owner) == shared


# -- ACT


def test_what_a_fork_reserves_and_what_nobody_may_take(lab):  # ACT-01, ACT-08
    lab = lab(num_pages=6, extra_state_slots=1, host_state_slots=0, host_pages=0)
    x = lab.keep(128)
    y = lab.enter(lab.work(text(128) + text(10), 118), ref_of(x))  # 256 tokens: 2 shared, 2 of growth
    assert lab.program.occupancy()["main_pages"] == 4 and lab.program.occupancy()["state_slots"] == 2
    lab.feed(y)
    z, *_ = lab.plan(lab.work(text(5, 1), 64 * 3 - 5))
    assert z is None  # two pages are free, the others belong to the actives
    handle = lab.enter(lab.work(text(5, 1), 64 * 2 - 5))
    lab.feed(handle)
    problem = lab.program.capture_problem(handle)  # frontier 5: a shared capture needs one page
    assert seal(problem, one_target(identity_targets(problem), 0)) is None
    before = lab.program.occupancy(), lab.program.resource_revision
    skipped = lab.program.capture_private(handle, CLOSURE)  # ACT-11: nor is there a state slot
    assert isinstance(skipped.outcome, Aborted) and skipped.owners == ()
    assert (lab.program.occupancy(), lab.program.resource_revision) == before
    lab.decode(handle, 20)  # and the request goes on
    lab.check()


def test_terminal_pending_keeps_everything_while_another_materialises(lab):  # ACT-09, TX-09, TX-14
    lab = lab(num_pages=12, copy_polls=3)
    x = lab.keep(300)
    b = lab.program.activate(lab.work(text(100, 2), 90))
    lab.feed(b)
    lab.begin(lab.work(text(5, 1), 64 * 8 - 5), codes={x.owner: DEMOTE_ALL})
    assert lab.program.advance_transition() is None  # copies in flight
    frontier = lab.program.frontier_tokens(b)
    skipped = lab.program.capture_private(b, CLOSURE)
    assert isinstance(skipped.outcome, Aborted) and "open" in skipped.outcome.reason
    lab.decode(b, 40)  # inside its own reservation, over a page boundary
    assert lab.program.frontier_tokens(b) == frontier + 40
    lab.program.terminate(b)
    held = lab.program.occupancy(), lab.program.resource_revision
    for end in (lab.program.finish, lab.program.discard):
        with pytest.raises(ContractError, match="open transition"):
            end(b)
    with pytest.raises(ContractError, match="open"):
        lab.program.evict(x.owner_key)
    assert (lab.program.occupancy(), lab.program.resource_revision) == held
    assert lab.program.frontier_tokens(b) == frontier + 40
    active = lab.settle().active
    assert lab.trace == (
        Phase.HOST_RELEASES,
        Phase.COPY_PREPARATION,
        Phase.COPIES_IN_FLIGHT,
        Phase.COPY_PUBLICATION,
        Phase.COMMITTED,
    )
    revision = lab.program.resource_revision
    result = lab.program.finish(b)
    assert isinstance(result.outcome, Committed) and len(result.owners) == 1
    assert lab.program.resource_revision == revision + 1 == result.outcome.revision
    lab.check()
    lab.answer(active)


# -- TX


def test_a_stale_plan_has_no_effect(lab):  # TX-01
    lab = lab()
    x = lab.keep(100)
    y = lab.keep(text(100, 9))
    planned = lab.plan(lab.work([*text(100), 1], 5), ref_of(x), CONSUME)
    lab.program.evict(y.owner_key)
    before = lab.program.occupancy(), lab.program.resource_revision, lab.program._resources.state
    with pytest.raises(StalePlanError):
        lab.program.start(*planned)
    assert before[:2] == (lab.program.occupancy(), lab.program.resource_revision)
    assert lab.program._resources.state is before[2] and not lab.program.has_open_transition
    lab.answer(lab.enter(lab.work([*text(100), 1], 5), ref_of(x), CONSUME))


def test_phases_without_copies(lab):  # TX-03
    lab = lab(num_pages=6)
    x = lab.keep(250)
    lab.begin(lab.work(text(100, 1), 64 * 6 - 100), maximal=True)
    result = lab.settle()
    assert lab.trace == (
        Phase.HOST_RELEASES,
        Phase.COPY_PREPARATION,
        Phase.COPY_PUBLICATION,
        Phase.COMMITTED,
    )
    assert result.outcome.evicted == (x.owner,) and result.outcome.deleted == tuple(sorted(x.refs))
    lab.answer(result.active)


def test_a_plan_runs_once(lab):  # TX-10
    lab = lab()
    planned = lab.plan(lab.work(100, 5))
    lab.program.start(*planned)
    with pytest.raises(PlanConsumedError):
        lab.program.start(*planned)
    lab.settle()
    with pytest.raises(PlanConsumedError):
        lab.program.start(*planned)
    with pytest.raises(AttributeError):
        planned[0].candidate = None
    lab.check()


def test_only_one_transition_is_open(lab):
    lab = lab()
    first, second = lab.plan(lab.work(100, 5)), lab.plan(lab.work(text(50, 1), 5))
    lab.program.start(*first)
    with pytest.raises(ContractError, match="still open"):
        lab.program.start(*second)
    lab.settle()
    with pytest.raises(StalePlanError):
        lab.program.start(*second)


def snapshot(program):
    """What an abort that published nothing must leave as it was."""
    program.occupancy()  # brings the state up to the frontiers
    resources = program._resources
    owners = np.flatnonzero(resources.state.owner_kind != OwnerKind.FREE).tolist()
    books = [dict(book._page_of) for book in resources._books]
    return program.occupancy(), [resources.summary(o) for o in owners], books, resources.state.arena


SCENES = {
    "demote": (DEMOTE_ALL, None),
    "restore": (None, CONSUME),
    "restore and keep": (None, RETAIN),
}


def prepare_scene(lab, name):
    x = lab.keep(150, captures={100: CLOSURE})
    y = lab.keep(text(200, 9))
    if name != "demote":
        lab.demote(x)
        lab.log.clear()
        work = lab.work(text(150) + text(30, 1), 64)
        return x, y, lambda: lab.begin(work, ref_of(x), SCENES[name][1], codes={y.owner: DEMOTE_ALL})
    lab.log.clear()
    work = lab.work(text(5, 1), 100)
    return x, y, lambda: lab.begin(work, codes={x.owner: DEMOTE_ALL})


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("nth", range(1, 14))
def test_whichever_operation_fails_nothing_is_half_done(lab, scene, nth):  # X-9, TX-13
    lab = lab(num_pages=12)
    x, y, begin = prepare_scene(lab, scene)
    before = snapshot(lab.program)
    seen = []

    def fail(name):
        seen.append(name)
        if len(seen) == nth:
            raise RuntimeError(f"{name} failed")

    lab.program._resources._on_operation = fail
    begin()
    result = lab.settle()
    if len(seen) < nth:
        assert isinstance(result.outcome, Committed)
        return
    assert isinstance(result.outcome, Aborted) and seen[-1] in result.outcome.reason
    assert result.active is None and (result.outcome.deleted, result.outcome.evicted) == ((), ())
    published = "publish host" in seen[:-1]
    if not published:
        assert snapshot(lab.program) == before
    lab.program._resources._on_operation = lambda name: None
    for owner, tokens in ((x, text(150)), (y, text(200, 9))):
        for c in owner.checkpoints:
            work = lab.work([*tokens[: c.frontier_tokens], 1], 5)
            assert lab.program.verify(c.ref, work.identity)
            handle = lab.enter(work, c.ref)
            lab.answer(handle)
            lab.drop(handle)
    for owner in (x, y):
        lab.program.evict(owner.owner_key)
    assert set(lab.program.occupancy().values()) == {0}


def test_the_failures_reached_every_kind_of_operation(lab):
    names = set()
    for scene in SCENES:
        one = lab(num_pages=12)
        *_, begin = prepare_scene(one, scene)
        begin()
        one.settle()
        names |= set(one.log)
    assert names == {
        *("release", "reserve host", "copy image out", "copy pages out", "land copy", "publish host"),
        *("reserve device", "copy pages in", "copy image in", "commit", "reserve growth", "copy tail"),
    }


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("boundary", range(6))
def test_a_cancel_is_honoured_at_the_next_stable_boundary(lab, scene, boundary):
    lab = lab(num_pages=12, copy_polls=3)
    x, _, begin = prepare_scene(lab, scene)
    before = snapshot(lab.program)
    begin()
    for _ in range(boundary):
        if lab.program.has_open_transition:
            result = lab.program.advance_transition()
    if not lab.program.has_open_transition:
        assert isinstance(result.outcome, Committed)
        lab.answer(result.active)
        return
    lab.program.cancel_transition()
    lab.program.cancel_transition()  # twice is once
    result = lab.settle()
    assert isinstance(result.outcome, Aborted)
    assert snapshot(lab.program) == before
    lab.answer(lab.enter(lab.work([*text(150), 1], 5), ref_of(x), CONSUME))


def test_a_failure_after_the_tail_copy_has_written_over_nothing(lab):  # beside the source, not into it
    lab = lab(num_pages=5)
    x = lab.keep(150, captures={100: CLOSURE})  # page 2 is given up by a start from the closure
    other = lab.enter(lab.work([*text(150), 1], 1), ref_of(x))  # page 1 is in two spaces from here on
    lab.answer(other)
    lab.publish(other)
    lab.demote(x, DEMOTE_STATE)
    failures = ["copy image in", "reserve growth"]

    def fail(name):
        lab.log.append(name)
        if failures and name == failures[0]:
            raise RuntimeError(failures.pop(0))

    lab.program._resources._on_operation = fail
    work = lab.work(text(100) + text(30, 1), 50)  # a tail and one page of growth; one page is free
    for _ in range(2):
        lab.begin(work, ref_of(x, CLOSURE), CONSUME)
        assert isinstance(lab.settle().outcome, Aborted)
    assert not failures
    handle = lab.enter(lab.work([*text(150), 1], 2), ref_of(x))
    lab.answer(handle)  # the executor re-reads page 2
    lab.drop(handle)
    handle = lab.enter(work, ref_of(x, CLOSURE), CONSUME)
    assert "copy tail" in lab.log
    lab.answer(handle)


# -- REV


def test_what_moves_the_revision(lab):  # REV-01, REV-02, REV-06
    lab = lab(num_pages=12)
    revisions = [lab.program.resource_revision]

    def moved() -> bool:
        revisions.append(lab.program.resource_revision)
        return revisions[-1] == revisions[-2] + 1

    handle = lab.program.activate(lab.work(100, 200))
    assert moved()
    lab.feed(handle)
    lab.decode(handle, 150)
    lab.program.occupancy()
    assert lab.program.resource_revision == revisions[-1]
    assert isinstance(lab.program.capture_private(handle, CLOSURE).outcome, Committed) and moved()
    lab.program.terminate(handle)
    assert lab.program.resource_revision == revisions[-1]
    x = lab.program.finish(handle).owners[0]
    assert moved()
    other = lab.enter(lab.work(text(5, 1), 5), codes={x.owner: DEMOTE_ALL})
    assert moved()
    lab.program.terminate(other)
    lab.program.discard(other)
    assert moved()
    lab.program.evict(x.owner_key)
    assert moved()
    y = lab.keep(50)
    assert y.owner == x.owner and y.generation != x.generation
    with pytest.raises(StaleHandleError):
        lab.program.evict(x.owner_key)
    assert lab.program.summary(y.owner) == y


# -- ends


@pytest.mark.parametrize("kind", [ENDPOINT, CLOSURE])
@pytest.mark.parametrize("where", [None, DEMOTE_ALL])
def test_a_request_that_ends_before_its_first_step_loses_nothing_of_what_it_consumed(lab, kind, where):
    lab = lab(num_pages=12)
    x = lab.keep(150, captures={100: CLOSURE})
    if where is not None:
        lab.demote(x, where)
    base = 150 if kind is ENDPOINT else 100
    handle = lab.enter(lab.work(text(base) + text(30, 1), 5), ref_of(x, kind), CONSUME)
    y = lab.publish(handle)  # cancelled at once
    assert {c.frontier_tokens for c in y.checkpoints} == ({100, 150} if kind is ENDPOINT else {100})
    again = lab.enter(lab.work(text(base) + text(30, 1), 5), y.checkpoints[-1].ref, CONSUME)
    lab.answer(again)


def test_a_checkpoint_at_the_endpoints_frontier_is_not_kept_twice(lab):
    lab = lab()
    x = lab.keep(100, captures={100: CheckpointKind.RESPONSE_REPLAY})
    assert [c.ref.kind for c in x.checkpoints] == [ENDPOINT]
    assert lab.program.occupancy()["state_slots"] == 1


def test_a_capture_whose_copy_fails_is_a_skip(lab):  # invariant 15
    lab = lab()
    handle = lab.program.activate(lab.work(100, 20))
    lab.feed(handle)
    before = snapshot(lab.program)

    def fail(step):
        if step == "copy":
            raise RuntimeError("copy failed")

    lab.program._executor.before_step = fail
    result = lab.program.capture_private(handle, CLOSURE)
    assert isinstance(result.outcome, Aborted) and "copy failed" in result.outcome.reason
    problem = lab.program.capture_problem(handle)
    target = one_target(identity_targets(problem), 0)
    lab.program.start_capture(seal(problem, target), problem, target, handle)
    assert isinstance(lab.settle().outcome, Aborted)
    lab.program._executor.before_step = None
    assert snapshot(lab.program) == before
    lab.decode(handle, 19)
    lab.publish(handle)


def test_a_shared_tail_copy_that_fails_loses_no_page(lab):
    lab = lab()
    handle = lab.program.activate(lab.work(100, 20))
    lab.feed(handle)
    problem = lab.program.capture_problem(handle)
    target = one_target(identity_targets(problem), 0)
    copies = []

    def fail(step):
        copies.append(step)
        if step == "copy" and copies.count("copy") == 2:  # the image, then the tail page
            raise RuntimeError("copy failed")

    lab.program._executor.before_step = fail
    lab.program.start_capture(seal(problem, target), problem, target, handle)
    assert isinstance(lab.settle().outcome, Aborted)
    lab.decode(handle, 19)
    lab.publish(handle)
