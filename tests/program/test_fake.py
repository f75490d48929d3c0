"""The model-free executor must notice wrong pages, slots and lengths, or it proves nothing about books."""

from __future__ import annotations

import pytest

from ninfer_jax.errors import InvariantError
from ninfer_jax.program.fake import expected_tokens, mix
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.row_layout import PROMPT_TOKENS


def started(build, **settings):
    program = build.program(**settings)
    handle = program.activate(build.work(100, 60))
    program.commit(program.prefill(handle), [1])
    return program, handle, program._active[handle.lane]


def test_tokens_depend_on_prompt_seed_and_position(build):
    base = expected_tokens([1, 2, 3], LaneSampling(seed=1), 8, 1000)
    assert expected_tokens([1, 2, 3], LaneSampling(seed=1), 8, 1000) == base
    assert expected_tokens([1, 3, 2], LaneSampling(seed=1), 8, 1000) != base
    assert expected_tokens([1, 2, 3], LaneSampling(seed=2), 8, 1000) != base
    assert expected_tokens([1, 2, 3], LaneSampling(seed=1), 8, 1000, rope_delta=1) != base
    assert len({mix(mix(0, a), b) for a in range(30) for b in range(30)}) == 900


def test_it_notices_swapped_pages(build):
    program, handle, sequence = started(build)
    row = program._rows.tables[sequence.row]
    row[[0, 1]] = row[[1, 0]]
    with pytest.raises(InvariantError, match="do not hold the history"):
        program.decode([handle])


def test_it_notices_a_page_that_two_sequences_write(build):
    program, handle, _ = started(build)
    page = program.facts(handle).mapped_pages[0][0]
    program._resources._books[0]._free.insert(0, page)  # the page is handed out a second time
    other = program.activate(build.work(list(range(40)), 20))
    program.prefill(other)
    with pytest.raises(InvariantError, match="do not hold the history"):
        program.decode([handle])


def test_it_notices_an_unmapped_page(build):
    program, handle, sequence = started(build)
    program._rows.tables[sequence.row, 1] = -1
    with pytest.raises(InvariantError, match="which maps -1"):
        program.decode([handle])


def test_it_notices_a_wrong_state_slot_and_a_wrong_frontier(build):
    program, handle, sequence = started(build)
    program._rows.numbers[sequence.row, PROMPT_TOKENS] -= 1
    with pytest.raises(InvariantError, match="covers 100 tokens, the step starts at 99"):
        program.decode([handle])


def test_a_closed_one_refuses(build):
    program, _, _ = started(build)
    executor = program._executor
    program.close()
    with pytest.raises(InvariantError, match="closed executor"):
        executor.set_lane(0, LaneSampling(), None)
