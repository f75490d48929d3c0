"""A context taken out of one program and put into another: the same answers, whatever fits (C-11)."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer_jax.errors import ContractError
from ninfer_jax.identity import make_identity
from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind
from ninfer_jax.planner.plan import ResourcePlan
from ninfer_jax.planner.problem import identity_targets
from ninfer_jax.planner.target import take
from ninfer_jax.planner.transition import seal
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.fake import expected_tokens, open_fake_program
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.reuse import ROOT_CHOICE, SourceChoice

VOCAB = 64


def program_of(**settings):
    defaults = dict(num_pages=24, extra_state_slots=3, host_state_slots=4, host_pages=24, verify=True)
    return open_fake_program(**{**defaults, **settings})


def work_of(tokens, output=4, stops=()):
    return RequestWork(make_identity(tokens), output, LaneSampling(seed=3), capture_frontiers=tuple(stops))


def run(program, handle, *, captures=(), steps=3):
    """Prefills with captures, decodes, and publishes; returns the owner."""
    pending = None
    while pending is None:
        pending = program.prefill(handle)
        for frontier, kind, ordinal in captures:
            if pending is None and program.frontier_tokens(handle) == frontier:
                program.capture_private(handle, kind, ordinal=ordinal)
    program.commit(pending, [1])
    for _ in range(steps):
        program.commit(program.decode([handle]), [1])
    ledger = program.facts(handle).ledger_tokens
    program.terminate(handle)
    result = program.finish(handle)
    program.check()
    return result.owners[0], list(ledger)


def start_from(program, work, ref):
    problem = program.problem(work, [ROOT_CHOICE, SourceChoice(ref, Disposition.CONSUME)])
    target = take(identity_targets(problem), np.array([1]))
    plan = seal(problem, target)
    assert isinstance(plan, ResourcePlan)
    program.start(plan, problem, target, work)
    while (result := program.advance_transition()) is None:
        program.wait_for_copies()
    return result.active


def conversation(program, anchors=(64, 100)):
    prompt = [(5 * i + 1) % VOCAB for i in range(150)]
    captures = [(frontier, CheckpointKind.LONG_ANCHOR, n + 1) for n, frontier in enumerate(anchors)]
    handle = program.activate(work_of(prompt, stops=anchors))
    return run(program, handle, captures=captures)


def endpoint(summary):
    return next(c for c in summary.checkpoints if c.ref.kind is CheckpointKind.SESSION_ENDPOINT)


def go_on(program, summary, ledger):
    """Extends a context by some tokens and returns what is drawn; checks it against a solo run."""
    prompt = [*ledger, 7, 8, 9]
    work = work_of(prompt)
    assert program.verify(endpoint(summary).ref, work.identity)
    handle = start_from(program, work, endpoint(summary).ref)
    assert program.frontier_tokens(handle) == endpoint(summary).frontier_tokens
    _, full = run(program, handle)
    drawn = full[len(prompt) :]
    assert drawn == expected_tokens(np.asarray(prompt), LaneSampling(seed=3), 4, VOCAB)
    return drawn


def test_a_context_moves_to_another_program_with_every_checkpoint():  # PER-01
    old = program_of()
    summary, ledger = conversation(old)
    assert [c.frontier_tokens for c in summary.checkpoints] == [64, 100, 153]
    before, revision = old.occupancy(), old.resource_revision
    contents = old.read_context(summary.owner_key)()
    assert (old.occupancy(), old.resource_revision) == (before, revision)  # PER-02, REV-07
    new = program_of(num_pages=30, prefill_chunk_tokens=64, num_lanes=3)
    result, dropped = new.adopt_context(contents, max_long_anchors=2)
    new.check()
    (restored,) = result.owners
    assert dropped == () and restored.kind is OwnerKind.PRIVATE and new.resource_revision == 1
    assert [(c.ref.kind, c.frontier_tokens, c.key) for c in restored.checkpoints] == [
        (c.ref.kind, c.frontier_tokens, c.key) for c in summary.checkpoints
    ]
    assert go_on(new, restored, ledger) == go_on(old, summary, ledger)


def test_restore_then_save_is_a_fixed_point():
    old = program_of()
    summary, _ = conversation(old)
    first = old.read_context(summary.owner_key)()
    new = program_of()
    result, _ = new.adopt_context(first, max_long_anchors=2)
    second = new.read_context(result.owners[0].owner_key)()
    assert second.checkpoints == first.checkpoints and second.history == first.history
    assert np.array_equal(second.pages, first.pages)
    assert all(
        np.array_equal(a, b)
        for left, right in zip(first.images, second.images, strict=True)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "kept", "why"),
    [
        (dict(num_pages=8, max_context_tokens=256), [64, 100, 153], None),
        (dict(num_lanes=1, extra_state_slots=0, host_state_slots=1), [100, 153], "no state slot is free"),
        (dict(num_lanes=1, extra_state_slots=0, host_state_slots=0), [153], "no state slot is free"),
    ],
)
def test_a_smaller_program_keeps_the_endpoint_and_what_fits(settings, kept, why):
    old = program_of()
    summary, ledger = conversation(old)
    small = program_of(**settings)
    result, dropped = small.adopt_context(old.read_context(summary.owner_key)(), max_long_anchors=2)
    small.check()
    assert [c.frontier_tokens for c in result.owners[0].checkpoints] == kept
    assert {d.reason for d in dropped} == ({why} if why else set())
    go_on(small, result.owners[0], ledger)


def test_pages_without_room_on_device_go_to_host_and_come_back():
    old = program_of()
    summary, ledger = conversation(old)
    contents = old.read_context(summary.owner_key)()
    new = program_of(num_lanes=2, num_pages=8, max_context_tokens=512)
    busy, _ = run(new, new.activate(work_of(list(range(60)) * 6, output=4)))  # fills 6 of the 8 pages
    result, _ = new.adopt_context(contents, max_long_anchors=2)
    new.check()
    assert new.occupancy()["host_kv_pages"] == 3
    new.evict(busy.owner_key)
    go_on(new, result.owners[0], ledger)


def test_a_context_without_any_room_is_refused_and_nothing_changes():
    old = program_of()
    summary, _ = conversation(old)
    contents = old.read_context(summary.owner_key)()
    tiny = program_of(num_pages=8, host_pages=0, max_context_tokens=512)
    run(tiny, tiny.activate(work_of(list(range(60)) * 6, output=4)))
    before, revision = tiny.occupancy(), tiny.resource_revision
    refusal = tiny.adopt_context(contents, max_long_anchors=2)
    assert isinstance(refusal, str) and "3 pages are needed" in refusal
    assert (tiny.occupancy(), tiny.resource_revision) == (before, revision)
    tiny.check()


def test_more_anchors_than_this_engine_keeps_are_dropped_with_the_reason():
    old = program_of()
    summary, _ = conversation(old)
    new = program_of()
    result, dropped = new.adopt_context(old.read_context(summary.owner_key)(), max_long_anchors=1)
    assert [c.frontier_tokens for c in result.owners[0].checkpoints] == [100, 153]
    assert [(d.frontier_tokens, d.reason) for d in dropped] == [
        (64, "this engine keeps 1 long anchors in a continuation")
    ]


def test_neither_save_nor_restore_while_somebody_is_in_the_way():  # PER-04, PER-05
    program = program_of(num_lanes=1)
    summary, _ = conversation(program)
    contents = program.read_context(summary.owner_key)()
    program.activate(work_of([1, 2, 3]))
    with pytest.raises(ContractError, match="idle lane"):
        program.adopt_context(contents, max_long_anchors=2)
