"""Page store, slot pool and execution rows: units move, they never multiply (R-5, R-7, A-1, A-2)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.errors import InvariantError
from ninfer_jax.program.capacity import PoolCapacity, PoolKind, pages_for
from ninfer_jax.program.pages import PageStore
from ninfer_jax.program.row_layout import (
    LANE,
    LENGTH,
    NO_PAGE,
    POSITIONS,
    READ_SLOT,
    STEP,
    TOKEN,
    WRITE_SLOT,
)
from ninfer_jax.program.rows import ExecutionRows
from ninfer_jax.program.slots import SlotPool
from ninfer_jax.sampling_params import LaneSampling


def store(num_pages: int) -> PageStore:
    return PageStore(PoolCapacity(PoolKind.MAIN, num_pages, page_bytes=1))


def counts(pages: PageStore) -> tuple[int, int, int]:
    pages.check()
    return pages.num_mapped, pages.num_reserved, pages.num_available


def test_reserve_map_unmap_release():
    pages = store(10)
    space = pages.open(4)
    assert counts(pages) == (0, 4, 6)
    assert pages.grow(space, 3) == [0, 1, 2]
    assert counts(pages) == (3, 1, 6)
    assert pages.grow(space, 2) == []  # it has them
    assert pages.shrink(space, 1) == [1, 2]
    assert counts(pages) == (1, 3, 6)
    pages.close(space)
    assert counts(pages) == (0, 0, 10)


def test_mapping_beyond_the_entitlement_changes_nothing():
    pages = store(10)
    space = pages.open(2)
    with pytest.raises(InvariantError, match="entitled to 2"):
        pages.grow(space, 3)
    assert counts(pages) == (0, 2, 8)


def test_a_reservation_beyond_what_is_available_is_refused():
    pages = store(10)
    pages.open(7)
    with pytest.raises(InvariantError, match="reservation of 4 pages, 3 are available"):
        pages.open(4)
    assert counts(pages) == (0, 7, 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_any_order_of_operations_keeps_the_units(operations):
    pages, spaces = store(12), []
    for kind, number in operations:
        if kind == 0 and number <= pages.num_available:
            spaces.append(pages.open(number))
        elif spaces:
            space = spaces[number % len(spaces)]
            if kind == 1:
                pages.grow(space, min(number, space.entitled_pages))
            elif kind == 2:
                pages.shrink(space, number)
            elif kind == 3:
                pages.close(space)
                spaces.remove(space)
        entitled = sum(space.entitled_pages for space in spaces)
        mapped = [page for space in spaces for page in space.mapped]
        assert len(set(mapped)) == len(mapped)
        assert counts(pages) == (len(mapped), entitled - len(mapped), 12 - entitled)


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


def test_rows_forget_what_they_mapped():
    rows = ExecutionRows(2, 4)
    row = rows.lease(1, LaneSampling())
    rows.append(row, 0, [5, 6])
    rows.append(row, 2, [1])
    assert rows.tables[row].tolist() == [5, 6, 1, NO_PAGE]
    rows.give_back(row)
    assert np.all(rows.tables == NO_PAGE)


def test_a_committed_token_moves_its_rows_and_no_other():
    rows = ExecutionRows(3, 1)
    for lane in (4, 5, 6):
        row = rows.lease(lane, LaneSampling())
        rows.stand_at(row, read_slot=7, write_slot=8, num_tokens=10 * lane, position=lane, num_drawn=0)
    rows.advance([2, 0], [70, 71])
    lane, state, drawn = (
        rows.numbers[:, LANE],
        rows.numbers[:, [READ_SLOT, WRITE_SLOT]],
        rows.numbers[:, STEP],
    )
    assert (lane.tolist(), state.tolist(), drawn.tolist()) == ([4, 5, 6], [[7, 8]] * 3, [1, 0, 1])
    assert rows.numbers[:, TOKEN].tolist() == [71, 0, 70]
    assert rows.numbers[:, POSITIONS:LENGTH].tolist() == [[5] * 3, [5] * 3, [7] * 3]
    assert rows.numbers[:, LENGTH].tolist() == [41, 50, 61]


def test_a_step_runs_on_a_copy_that_later_commits_leave_alone():
    rows = ExecutionRows(2, 3)
    row = rows.lease(1, LaneSampling())
    copied = rows.copy([row])
    before = copied.copy()
    rows.append(row, 0, [5])
    rows.advance([row], [9])
    assert np.array_equal(copied, before) and not np.array_equal(rows.copy([row]), before)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (150, 3), (700, 11)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens) == pages
