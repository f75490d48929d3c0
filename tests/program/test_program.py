"""Program over the model-free executor: guarantees, chunks, batches, commits, handles, revisions."""

from __future__ import annotations

import dataclasses

import pytest

from ninfer_jax.errors import ContractError, InvariantError, StaleHandleError
from ninfer_jax.program.fake import FakeExecutor, expected_tokens
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.memory_table import MemoryTable
from ninfer_jax.program.program import Program
from ninfer_jax.program.sequence import SequencePhase
from ninfer_jax.request import AdmissionStatus, SequenceHandle


def prefill_whole(program, handle):
    while (pending := program.prefill(handle)) is None:
        pass
    return pending


def is_idle(program) -> bool:
    program.check()
    return set(program.occupancy().values()) == {0}


# -- ACT-01, A-1: what publication as Active reserves


def test_activation_reserves_prompt_and_output_at_once(build):
    program = build.program()
    handle = program.activate(build.work(100, 50))  # 150 tokens = 3 pages, one state destination
    assert program.occupancy()["main_pages"] == 3
    assert program.occupancy()["main_pages_reserved"] == 3
    assert program.occupancy()["state_slots"] == 1
    program.commit(prefill_whole(program, handle), [1])
    facts = program.facts(handle)
    assert len(facts.mapped_pages[0]) == 2  # 100 tokens
    assert facts.reserved_pages == (1,)
    assert (
        program.occupancy()["main_pages"] == 3
    )  # converting a reserved page moves a unit, it adds none (OCC-02)
    program.check()


def test_every_reserved_token_can_be_used_and_not_one_more(build):
    program = build.program(num_pages=3, max_context_tokens=150)
    handle = program.activate(build.work(100, 50))
    program.commit(prefill_whole(program, handle), [1])
    for _ in range(49):
        program.commit(program.decode([handle]), [1])
    assert program.facts(handle).reserved_pages == (0,)
    with pytest.raises(ContractError, match="drawn its whole output"):
        program.decode([handle])
    program.check()


# -- ACT-08, ACT-09: reservations cannot be borrowed, terminal keeps everything


def test_nobody_takes_a_page_that_is_reserved_but_unmapped(build):
    program = build.program(num_pages=11, max_context_tokens=640)
    program.activate(build.work(10, 600))  # 10 pages, none mapped yet
    assert program.occupancy()["main_pages_reserved"] == 10
    assert program.assess(build.work(10, 54)) is AdmissionStatus.READY
    assert program.assess(build.work(10, 55)) is AdmissionStatus.TEMPORARILY_BLOCKED
    with pytest.raises(ContractError, match="temporarily_blocked"):
        program.activate(build.work(10, 55))
    program.check()


def test_terminal_pending_keeps_lane_handle_and_reservation_until_discard(build):
    program = build.program()
    handle = program.activate(build.work(100, 50))
    program.commit(prefill_whole(program, handle), [1])
    before = program.occupancy()
    program.terminate(handle)
    assert program.occupancy() == before
    assert program.facts(handle).phase is SequencePhase.TERMINAL_PENDING
    for call in (program.prefill, program.terminate, lambda h: program.decode([h])):
        with pytest.raises(ContractError):
            call(handle)
    program.discard(handle)
    assert is_idle(program)


# -- G-14, RDY-01, RDY-02


def test_readiness_distinguishes_never_from_not_now(build):
    program = build.program(num_pages=10, max_context_tokens=704)
    assert program.assess(build.work(690, 10)) is AdmissionStatus.PERMANENTLY_INFEASIBLE  # 11 pages of 10
    first = program.activate(build.work(300, 84))  # 6 pages
    work = build.work(300, 84)
    assert program.assess(work) is AdmissionStatus.TEMPORARILY_BLOCKED
    program.terminate(first)
    assert program.assess(work) is AdmissionStatus.TEMPORARILY_BLOCKED
    program.discard(first)
    assert program.assess(work) is AdmissionStatus.READY


def test_longer_than_max_context_is_never_feasible(build):
    program = build.program(num_pages=16, max_context_tokens=100)
    assert program.assess(build.work(60, 40)) is AdmissionStatus.READY
    assert program.assess(build.work(60, 41)) is AdmissionStatus.PERMANENTLY_INFEASIBLE


def test_a_full_house_of_lanes_blocks(build):
    program = build.program(num_lanes=2)
    for _ in range(2):
        program.activate(build.work(5, 5))
    assert program.assess(build.work(5, 5)) is AdmissionStatus.TEMPORARILY_BLOCKED


# -- chunks: C-7, C-9


@pytest.mark.parametrize(
    ("prompt", "frontiers", "chunks"),
    [
        (100, (), [(0, 100)]),
        (128, (), [(0, 128)]),
        (300, (), [(0, 128), (128, 128), (256, 44)]),
        (300, (50, 200), [(0, 50), (50, 128), (178, 22), (200, 100)]),
        (
            300,
            (128, 256, 300),
            [(0, 128), (128, 128), (256, 44)],
        ),  # frontiers on chunk ends and on the prompt's end
        (100, (0, 99), [(0, 99), (99, 1)]),
    ],
)
def test_prefill_splits_at_the_chunk_and_at_every_rewrite_frontier(build, prompt, frontiers, chunks):
    program = build.program()
    handle = program.activate(build.work(prompt, 4, frontiers=frontiers))
    pending, calls = None, 0
    while pending is None:
        pending = program.prefill(handle)
        calls += 1
    assert calls == len(chunks)
    assert program.facts(handle).history == tuple((*chunk, False, 1) for chunk in chunks)  # C-9
    assert program.facts(handle).frontier_tokens == prompt
    program.check()


def test_the_first_drawn_token_is_not_in_kv_until_decode_writes_it(build):
    program = build.program()
    handle = program.activate(build.work(64, 3))
    program.commit(prefill_whole(program, handle), [1])
    assert program.facts(handle).frontier_tokens == 64
    assert len(program.facts(handle).ledger_tokens) == 65
    assert len(program.facts(handle).mapped_pages[0]) == 1
    program.commit(program.decode([handle]), [1])
    assert program.facts(handle).frontier_tokens == 65
    assert len(program.facts(handle).ledger_tokens) == 66
    assert len(program.facts(handle).mapped_pages[0]) == 2


# -- what is computed: rows are independent of batch, lane, pages and each other


def test_a_row_draws_what_its_solo_run_draws_whatever_the_batch(build):
    program = build.program(num_lanes=3, num_pages=24)
    jobs = [(40, 1), (130, 2), (200, 3)]
    works = [build.work(size, 30, sampling=LaneSampling(seed=seed), rope_delta=seed) for size, seed in jobs]
    handles = [program.activate(work) for work in works]
    for handle in handles:
        program.commit(prefill_whole(program, handle), [1])
    order = [[0, 1, 2], [2, 0], [1], [1, 2, 0], [0]]
    for step in range(20):
        batch = [handles[index] for index in order[step % len(order)]]
        program.commit(program.decode(batch), [1] * len(batch))
        program.check()
    for (size, seed), work, handle in zip(jobs, works, handles, strict=True):
        facts = program.facts(handle)
        expected = expected_tokens(
            work.identity.tokens, work.sampling, facts.num_output_tokens, vocab_size=50, rope_delta=seed
        )
        assert list(facts.ledger_tokens[size:]) == expected


def test_min_tokens_holds_the_banned_ids_back(build):
    sampling = LaneSampling(min_tokens=20, ban_token_ids=tuple(range(25)))
    program = build.program()
    output = build.run_alone(program, build.work(10, 40, sampling=sampling))
    assert min(output[:20]) >= 25
    assert min(output[20:]) < 25  # 20 draws of 50 ids, half of them low


# -- a batch is consumed whole, once


def test_a_batch_is_consumed_exactly_once(build):
    program = build.program()
    handle = program.activate(build.work(10, 5))
    pending = prefill_whole(program, handle)
    program.commit(pending, [1])
    for consume in (lambda: program.commit(pending, [1]), lambda: program.abort(pending)):
        with pytest.raises(ContractError, match="not open"):
            consume()
    assert len(program.facts(handle).ledger_tokens) == 11


@pytest.mark.parametrize("accepted", [[], [1], [1, 1, 1], [2, 1], [1, -1]])
def test_wrong_counts_change_nothing(build, accepted):
    program = build.program()
    handles = [program.activate(build.work(10, 5)) for _ in range(2)]
    for handle in handles:
        program.commit(prefill_whole(program, handle), [1])
    pending = program.decode(handles)
    before = [program.facts(handle) for handle in handles]
    with pytest.raises(ContractError, match=r"commit got|accepts"):
        program.commit(pending, accepted)
    assert [program.facts(handle) for handle in handles] == before
    program.commit(pending, [1, 1])  # still whole
    program.check()


def test_a_row_in_an_open_batch_can_do_nothing_else(build):
    program = build.program()
    handle = program.activate(build.work(10, 5))
    program.commit(prefill_whole(program, handle), [1])
    pending = program.decode([handle])
    for call in (program.prefill, program.terminate, program.discard, lambda h: program.decode([h])):
        with pytest.raises(ContractError, match="uncommitted batch"):
            call(handle)
    program.commit(pending, [1])
    program.check()


def test_a_cancelled_row_only_ends_while_its_neighbour_goes_on(build):
    program = build.program()
    handles = [program.activate(build.work(10, 5)) for _ in range(2)]
    for handle in handles:
        program.commit(prefill_whole(program, handle), [1])
    program.commit(program.decode(handles), [0, 1])
    assert program.facts(handles[0]).num_output_tokens == 1
    assert program.facts(handles[1]).num_output_tokens == 2
    with pytest.raises(ContractError, match="ending"):
        program.decode(handles)
    program.commit(program.decode(handles[1:]), [1])
    for handle in handles:
        program.terminate(handle)
        program.discard(handle)
    assert is_idle(program)


def test_an_aborted_batch_ends_its_rows(build):
    program = build.program()
    handle = program.activate(build.work(10, 5))
    program.commit(prefill_whole(program, handle), [1])
    program.abort(program.decode([handle]))
    with pytest.raises(ContractError, match="ending"):
        program.decode([handle])
    program.terminate(handle)
    program.discard(handle)
    assert is_idle(program)


def test_a_batch_of_another_program_is_refused(build):
    first, second = build.program(), build.program()
    handle = first.activate(build.work(10, 5))
    pending = prefill_whole(first, handle)
    second.activate(build.work(10, 5))
    with pytest.raises(ContractError, match="not open"):
        second.commit(pending, [1])


def test_decode_takes_each_sequence_once_and_only_when_ready(build):
    program = build.program()
    handle = program.activate(build.work(200, 5))
    with pytest.raises(ContractError, match="prefill"):
        program.decode([handle])
    program.commit(prefill_whole(program, handle), [1])
    with pytest.raises(ContractError, match="twice"):
        program.decode([handle, handle])
    with pytest.raises(ContractError, match="at least one"):
        program.decode([])
    with pytest.raises(ContractError, match="decode_ready"):
        program.prefill(handle)
    with pytest.raises(ContractError, match="decode_ready"):
        program.discard(handle)


# -- REV-01, REV-02, REV-06


def test_own_progress_moves_no_revision_admission_and_release_do(build):
    program = build.program()
    start = program.resource_revision
    handle = program.activate(build.work(100, 100))
    after_activation = program.resource_revision
    assert after_activation == start + 1
    program.commit(prefill_whole(program, handle), [1])
    for _ in range(99):
        program.commit(program.decode([handle]), [1])
    program.assess(build.work(5, 5))
    program.terminate(handle)
    assert program.resource_revision == after_activation
    program.discard(handle)
    assert program.resource_revision == after_activation + 1


def test_an_old_handle_is_stale_after_its_lane_is_reused(build):
    program = build.program()
    old = program.activate(build.work(10, 5))
    program.terminate(old)
    program.discard(old)
    new = program.activate(build.work(10, 5))
    assert new.lane == old.lane and new.generation != old.generation
    before = program.facts(new)
    for call in (
        program.prefill,
        program.terminate,
        program.discard,
        program.facts,
        lambda h: program.decode([h]),
    ):
        with pytest.raises(StaleHandleError):
            call(old)
    assert program.facts(new) == before


def test_a_handle_of_nothing_is_stale(build):
    with pytest.raises(StaleHandleError, match="free"):
        build.program().prefill(SequenceHandle(1, 1))


# -- identities are independent, allocation repeats


def test_lane_row_and_state_slot_are_different_identities(build):
    program = build.program(num_lanes=3, extra_state_slots=2)
    first = program.activate(build.work(10, 5))
    program.commit(prefill_whole(program, first), [1])
    program.terminate(first)
    assert program.finish(first).owners  # its endpoint keeps slot 0
    handles = [program.activate(build.work(10, 5)) for _ in range(3)]
    assert [program.facts(handle).state_slot for handle in handles] == [
        1,
        2,
        3,
    ]  # S-1: one pool, no lane's own
    assert [handle.lane for handle in handles] == [0, 1, 2]


def test_the_lowest_free_ids_are_taken(build):
    program = build.program(num_lanes=3)
    handles = [program.activate(build.work(100, 28)) for _ in range(3)]
    for handle in handles:
        program.commit(prefill_whole(program, handle), [1])
    assert [program.facts(handle).mapped_pages[0] for handle in handles] == [(0, 1), (2, 3), (4, 5)]
    program.terminate(handles[1])
    program.discard(handles[1])
    again = program.activate(build.work(150, 42))
    assert again.lane == 1
    program.commit(prefill_whole(program, again), [1])
    assert program.facts(again).mapped_pages[0] == (2, 3, 6)


def test_a_request_without_prompt_or_output_is_refused(build):
    program = build.program()
    for work in (build.work(0, 5), build.work(5, 0)):
        with pytest.raises(ContractError, match="at least one prompt and one output"):
            program.activate(work)
    assert is_idle(program)


# -- faults and the end


def test_reset_after_a_device_fault_leaves_nothing_and_runs_on(build):
    def fail_on_decode(step):
        if step == "decode" and faults:
            raise RuntimeError(faults.pop())

    faults = ["device lost"]
    program = build.program(before_step=fail_on_decode)
    handle = program.activate(build.work(10, 5))
    program.commit(prefill_whole(program, handle), [1])
    with pytest.raises(RuntimeError, match="device lost"):
        program.decode([handle])
    program.check()  # the books are still one
    program.reset()
    assert is_idle(program)
    with pytest.raises(StaleHandleError):
        program.terminate(handle)
    work = build.work(10, 5)
    assert build.run_alone(program, work) == expected_tokens(
        work.identity.tokens, work.sampling, 5, vocab_size=50
    )
    assert program.activate(work).generation > handle.generation


def test_close_is_final_and_idempotent(build):
    program = build.program()
    handle = program.activate(build.work(10, 5))
    program.close()
    program.close()
    assert set(program.occupancy().values()) == {0}
    with pytest.raises(ContractError, match="closed"):
        program.prefill(handle)
    with pytest.raises(ContractError, match="closed"):
        program.activate(build.work(10, 5))


def test_a_second_page_pool_is_refused_instead_of_overwriting_the_first_ones_rows(build):
    capacity = build.program().capacity
    two = dataclasses.replace(capacity, pools=capacity.pools * 2)
    with pytest.raises(InvariantError, match="2 page pools"):
        Program(two, FakeExecutor(two, vocab_size=50), prefill_chunk_tokens=64, memory=MemoryTable((), 0, 0))


def test_a_step_that_claims_two_tokens_a_row_is_refused(build):
    program = build.program()
    pending = prefill_whole(program, program.activate(build.work(10, 5)))
    object.__setattr__(pending, "produced", (2,))
    with pytest.raises(InvariantError, match="one token per row"):
        program.commit(pending, [2])
    assert program.occupancy()["open_batches"] == 1
