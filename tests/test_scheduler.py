"""Scheduler: the table of choices, queue bounds and deadlines, and that nobody starves (Q-3, D-1, G-14)."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.errors import InvariantError
from ninfer_jax.request import AdmissionStatus
from ninfer_jax.scheduler import (
    IDLE,
    NO_DEADLINE_NS,
    AdmissionVerdict,
    Admit,
    BoundaryView,
    Decode,
    Prefill,
    Scheduler,
    choose,
    judge,
)


def view(**changes):
    quiet = {
        "head": None,
        "head_is_blocked": False,
        "backfill": None,
        "may_admit": True,
        "free_lanes": 1,
        "prefilling": (),
        "decode_ready": (),
        "prefill_was_last": False,
    }
    return BoundaryView(**{**quiet, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, IDLE),
        ({"head": 7}, Admit(7)),
        ({"head": 7, "prefilling": (1,), "decode_ready": (2,)}, Admit(7)),
        ({"head": 7, "free_lanes": 0}, IDLE),
        ({"head": 7, "head_is_blocked": True}, IDLE),
        ({"head": 7, "head_is_blocked": True, "prefilling": (1,)}, Prefill(1)),
        ({"head": 7, "head_is_blocked": True, "backfill": 9}, Admit(9, head=7)),  # under proof
        ({"head": 7, "head_is_blocked": True, "backfill": 9, "free_lanes": 0}, IDLE),
        ({"head": 7, "may_admit": False, "decode_ready": (2,)}, Decode((2,))),  # a transition is open
        ({"prefilling": (1, 2)}, Prefill(1)),
        ({"prefilling": (1, 2), "prefill_was_last": True}, Prefill(1)),
        ({"prefilling": (1,), "decode_ready": (2, 3)}, Prefill(1)),
        ({"prefilling": (1,), "decode_ready": (2, 3), "prefill_was_last": True}, Decode((2, 3))),
        ({"decode_ready": (2, 3)}, Decode((2, 3))),
        ({"decode_ready": (2, 3), "prefill_was_last": True}, Decode((2, 3))),
    ],
)
def test_choose_follows_its_table(changes, expected):
    assert choose(view(**changes)) == expected


@pytest.mark.parametrize(
    ("status", "num_active", "expected"),
    [
        (AdmissionStatus.READY, 0, AdmissionVerdict.START),
        (AdmissionStatus.NEEDS_TRANSFER, 3, AdmissionVerdict.START),
        (AdmissionStatus.TEMPORARILY_BLOCKED, 1, AdmissionVerdict.KEEP_WAITING),
        (AdmissionStatus.TEMPORARILY_BLOCKED, 0, AdmissionVerdict.REJECT_OVERLOADED),  # design 6
        (AdmissionStatus.PERMANENTLY_INFEASIBLE, 2, AdmissionVerdict.REJECT_TOO_LARGE),
    ],
)
def test_judge_knows_exactly_four_answers(status, num_active, expected):
    # G-14
    assert judge(status, num_active) is expected


def admit(scheduler, request_id):
    scheduler.begin(request_id)
    scheduler.activate(request_id)


def test_the_queue_is_bounded_and_first_in_first_out():
    scheduler = Scheduler(num_lanes=2, max_waiting=2)
    assert scheduler.enqueue(1, 100) and scheduler.enqueue(2, 50)
    assert not scheduler.enqueue(3, 10)
    assert scheduler.waiting == (1, 2)
    assert scheduler.next_action(0) == Admit(1)  # SCH-01: nothing but age orders the queue
    admit(scheduler, 1)
    assert scheduler.next_action(0) == Admit(2)


def test_a_blocked_head_is_tried_again_only_after_resources_changed():
    # G-14: temporarily blocked is re-examined only after a change
    scheduler = Scheduler(num_lanes=2, max_waiting=4)
    scheduler.enqueue(1, NO_DEADLINE_NS)
    scheduler.block(1, resource_revision=5)
    assert scheduler.next_action(5) == IDLE
    assert scheduler.next_action(6) == Admit(1)


def test_the_block_belongs_to_the_head_that_got_it():
    scheduler = Scheduler(num_lanes=2, max_waiting=4)
    for request_id in (1, 2):
        scheduler.enqueue(request_id, NO_DEADLINE_NS)
    scheduler.block(1, 5)
    scheduler.drop_waiting(1)
    assert scheduler.next_action(5) == Admit(2)


def test_deadlines_of_waiting_requests():
    scheduler = Scheduler(num_lanes=1, max_waiting=4)
    for request_id, deadline_ns in ((1, 30), (2, 10), (3, 20)):
        scheduler.enqueue(request_id, deadline_ns)
    assert scheduler.first_deadline_ns == 10
    assert scheduler.expired(9) == ()
    assert scheduler.expired(20) == (2, 3)
    scheduler.drop_waiting(2)
    scheduler.drop_waiting(3)
    assert (scheduler.first_deadline_ns, scheduler.expired(29), scheduler.expired(30)) == (30, (), (1,))
    admit(scheduler, 1)
    assert scheduler.first_deadline_ns == NO_DEADLINE_NS


def test_misuse_is_an_invariant_error():
    scheduler = Scheduler(num_lanes=1, max_waiting=4)
    scheduler.enqueue(1, NO_DEADLINE_NS)
    scheduler.enqueue(2, NO_DEADLINE_NS)
    with pytest.raises(InvariantError, match="request 2 is not materialising"):
        scheduler.activate(2)
    admit(scheduler, 1)
    with pytest.raises(InvariantError, match="request 2 needs a lane, all 1 are in use"):
        scheduler.begin(2)
    with pytest.raises(InvariantError, match="request 9 holds no lane"):
        scheduler.leave(9)
    with pytest.raises(InvariantError, match="request 9 is not waiting"):
        scheduler.drop_waiting(9)
    with pytest.raises(InvariantError, match="request 2 is not prefilling"):
        scheduler.prefilled_chunk(2, is_complete=False)


def test_a_later_request_passes_only_behind_a_blocked_head_and_the_donors_are_fixed():
    # BF-03: whoever starts after the head was refused is no donor of it
    scheduler = Scheduler(num_lanes=3, max_waiting=8)
    for request_id in (1, 2, 3):
        scheduler.enqueue(request_id, NO_DEADLINE_NS)
    admit(scheduler, 1)
    assert scheduler.next_action(7) == Admit(2)  # SCH-01: the head first
    scheduler.block(2, 7)
    assert scheduler.donors(2) == (1,)
    assert scheduler.next_action(7) == Admit(3, head=2)
    admit(scheduler, 3)
    scheduler.block(2, 8)
    assert scheduler.donors(2) == (1,)
    scheduler.leave(1)
    assert scheduler.donors(2) == ()


def test_one_materialises_at_a_time_and_an_ended_request_keeps_its_lane_until_it_leaves():
    scheduler = Scheduler(num_lanes=2, max_waiting=4)
    for request_id in (1, 2, 3):
        scheduler.enqueue(request_id, NO_DEADLINE_NS)
    scheduler.begin(1)
    assert (scheduler.materializing, scheduler.num_active, scheduler.runnable) == (1, 1, 0)
    with pytest.raises(InvariantError, match="request 1 is materialising already"):
        scheduler.begin(2)
    scheduler.activate(1)
    scheduler.retire(1)
    assert (scheduler.num_active, scheduler.runnable) == (1, 0)
    scheduler.leave(1)
    assert scheduler.num_active == 0


@given(
    num_lanes=st.integers(1, 8),
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=24),
)
def test_no_lane_starves(num_lanes, requests):
    """Q-3, as numbers: a decode-ready row draws within 2 units; a lane's prompt ends within its share of
    units.

    A prompt waits for the chunks of prompts admitted before it, and each chunk for at most one decode round.
    """
    scheduler = Scheduler(num_lanes, max_waiting=len(requests))
    chunks_left, tokens_left = {}, {}
    for request_id, (chunks, tokens) in enumerate(requests):
        scheduler.enqueue(request_id, NO_DEADLINE_NS)
        chunks_left[request_id], tokens_left[request_id] = chunks, tokens
    last_drawn: dict[int, int] = {}
    prompt_due: dict[int, int] = {}
    ended: deque[int] = deque()
    unit = 0
    while len(ended) < len(requests):
        action = scheduler.next_action(0)
        if isinstance(action, Admit):
            admit(scheduler, action.request_id)
            ahead = sum(chunks_left[other] for other in scheduler.view(0).prefilling)
            prompt_due[action.request_id] = unit + 2 * ahead
            continue
        unit += 1
        if isinstance(action, Prefill):
            request_id = action.request_id
            chunks_left[request_id] -= 1
            is_complete = chunks_left[request_id] == 0
            scheduler.prefilled_chunk(request_id, is_complete=is_complete)
            if is_complete:
                assert unit <= prompt_due[request_id]
                last_drawn[request_id] = unit
        else:
            assert isinstance(action, Decode), action
            assert action.request_ids == scheduler.view(0).decode_ready  # exact B: all ready rows, no others
            scheduler.decoded()
            for request_id in action.request_ids:
                assert unit - last_drawn[request_id] <= 2
                last_drawn[request_id] = unit
                tokens_left[request_id] -= 1
                if tokens_left[request_id] == 0:
                    scheduler.leave(request_id)
                    ended.append(request_id)
    assert scheduler.next_action(0) == IDLE and scheduler.num_active == 0
