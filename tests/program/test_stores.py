"""Page book, slot pool and execution rows: units move, they never multiply (R-5, R-7, A-1, A-2)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.errors import InvariantError
from ninfer_jax.program.capacity import pages_for
from ninfer_jax.program.page_book import PageBook
from ninfer_jax.program.row_layout import (
    FLOATS,
    LANE,
    MIN_TOKENS,
    NO_PAGE,
    NUM_LOGPROBS,
    PROMPT_TOKENS,
    READ_SLOT,
    ROPE_DELTA,
    SEED,
    STEP,
    TABLE,
    TOKEN,
    TOP_K,
    WRITE_SLOT,
)
from ninfer_jax.program.rows import ExecutionRows
from ninfer_jax.program.slots import SlotPool
from ninfer_jax.sampling_params import LaneSampling


def test_pages_are_taken_named_and_forgotten():
    book = PageBook(4)
    assert book.take(3) == [0, 1, 2]
    book.name(70, 1)
    book.check(named=[70], promised=[0, 2])
    assert book.pages_of(70, 1) == [1]
    book.give_back([0])
    assert book.take(1) == [0]  # the lowest free one, so that runs repeat exactly
    book.forget([70])
    book.check(named=[], promised=[0, 2])
    assert book.num_free == 2


def test_a_page_is_never_promised_twice_and_a_name_never_given_twice():
    book = PageBook(2)
    book.take(2)
    with pytest.raises(InvariantError, match="1 pages wanted, 0 of 2"):
        book.take(1)
    book.name(5, 0)
    with pytest.raises(InvariantError, match="serial 5"):
        book.name(5, 1)
    with pytest.raises(InvariantError, match="not each of 2 once"):
        book.check(named=[5], promised=[])


@given(st.lists(st.tuples(st.sampled_from(["take", "name", "give_back", "forget"]), st.integers(1, 4))))
def test_any_order_of_operations_keeps_every_page_in_one_place(operations):
    book, promised, named, serial = PageBook(12), [], {}, 0
    for what, count in operations:
        if what == "take" and count <= book.num_free:
            promised += book.take(count)
        elif what == "name":
            for page in promised[:count]:
                book.name(serial, page)
                named[serial] = page
                serial += 1
            del promised[:count]
        elif what == "give_back":
            book.give_back(promised[:count])
            del promised[:count]
        else:
            gone = list(named)[:count]
            book.forget(gone)
            for name in gone:
                del named[name]
        book.check(named, promised)
        assert all(book.pages_of(name, 1) == [page] for name, page in named.items())


def test_slots_are_lowest_first_and_checked():
    pool = SlotPool("state slots", 3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InvariantError, match="all 3 state slots are taken"):
        pool.take()
    pool.give_back(2)
    pool.give_back(0)
    assert (pool.take(), pool.num_free, pool.num_taken) == (0, 1, 2)
    with pytest.raises(InvariantError, match="given back"):
        pool.give_back(2)
    pool.check()


def lease(rows: ExecutionRows, lane: int, **sampling) -> int:
    return rows.lease(
        lane=lane, state_slot=8, prompt_tokens=10 * lane, rope_delta=-2, sampling=LaneSampling(**sampling)
    )


def test_rows_forget_what_they_mapped():
    rows = ExecutionRows(2, 4)
    row = lease(rows, 1)
    rows.append(row, 0, [5, 6])
    rows.append(row, 2, [1])
    assert rows.tables[row].tolist() == [5, 6, 1, NO_PAGE]
    rows.give_back(row)
    assert np.all(rows.tables == NO_PAGE)


def test_a_row_carries_its_lanes_numbers_bit_for_bit():
    rows = ExecutionRows(1, 3)
    row = lease(rows, 5, temperature=0.7, min_p=0.1, top_k=40, seed=2**32 - 3, min_tokens=6, num_logprobs=2)
    rows.append(row, 0, [9])
    numbers = rows.copy([row])[0]
    assert numbers[[LANE, READ_SLOT, WRITE_SLOT, PROMPT_TOKENS, ROPE_DELTA]].tolist() == [5, 8, 8, 50, -2]
    assert numbers.view(np.float32)[FLOATS].tolist() == np.float32([0.7, 1, 0.1, 0, 0, 1]).tolist()
    assert numbers[[TOP_K, NUM_LOGPROBS, MIN_TOKENS]].tolist() == [40, 2, 6]
    assert numbers.view(np.uint32)[SEED] == 2**32 - 3
    assert numbers[TABLE].tolist() == [9, NO_PAGE, NO_PAGE]


def test_a_leased_row_has_drawn_nothing_whoever_had_it_before():
    rows = ExecutionRows(1, 1)
    row = lease(rows, 4)
    rows.feed_next(row, 70, 3)
    assert rows.numbers[row, [TOKEN, STEP]].tolist() == [70, 3]
    rows.give_back(row)
    assert lease(rows, 4) == row
    assert rows.numbers[row, [TOKEN, STEP]].tolist() == [0, 0]


def test_a_step_runs_on_a_copy_in_its_own_order_that_later_commits_leave_alone():
    rows = ExecutionRows(3, 3)
    for lane in (4, 5, 6):
        lease(rows, lane)
    copied = rows.copy([2, 0])
    assert copied[:, LANE].tolist() == [6, 4]
    before = copied.copy()
    rows.append(2, 0, [5])
    rows.feed_next(2, 9, 1)
    assert np.array_equal(copied, before) and not np.array_equal(rows.copy([2, 0]), before)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (150, 3), (700, 11)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens) == pages
