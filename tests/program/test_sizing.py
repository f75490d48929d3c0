"""Sizing: explicit, automatic and impossible capacities (K-9, R-1, F-3), and what messages offer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.errors import OptionError
from ninfer_jax.program.capacity import PoolKind, pages_for
from ninfer_jax.program.sizing import SizingOptions, UnitCosts, fixed_cost, plan_capacity

COSTS = UnitCosts(
    weights_bytes=10_000, page_bytes=100, state_image_bytes=50, sampler_row_bytes=7, scratch_bytes=1_000
)
OPTIONS = SizingOptions(
    max_context_tokens=640,
    max_concurrency=4,
    kv_capacity_tokens=None,
    device_state_slots=4,
    headroom_bytes=500,
)
FIXED = 10_000 + 8 * 50 + 4 * 7 + 1_000  # 11,428


def num_pages(plan) -> int:
    (pool,) = plan.capacity.pools
    return pool.num_pages


def test_the_fixed_part_of_the_reservation_curve():
    assert fixed_cost(OPTIONS, COSTS) == FIXED


@pytest.mark.parametrize(
    ("free_bytes", "pages"),
    [
        (FIXED + 10 * 100 + 500, 10),  # F = R + B_min: exactly the minimum, one longest request
        (FIXED + 10 * 100 + 500 + 99, 10),  # not quite one page more
        (FIXED + 10 * 100 + 500 + 100, 11),
        (FIXED + 39 * 100 + 500, 39),
        (FIXED + 40 * 100 + 500, 40),  # C * L: all that active requests can use
        (10**9, 40),
    ],
)
def test_automatic_capacity_follows_free_memory(free_bytes, pages):
    assert num_pages(plan_capacity(OPTIONS, COSTS, free_bytes)) == pages


def test_automatic_capacity_refuses_when_the_minimum_does_not_fit():
    with pytest.raises(OptionError, match=r"largest max_context that fits is 576\."):
        plan_capacity(OPTIONS, COSTS, FIXED + 10 * 100 + 500 - 1)


def test_automatic_capacity_needs_a_page_per_lane_even_when_contexts_are_short():
    options = dataclasses.replace(OPTIONS, max_context_tokens=64)
    assert num_pages(plan_capacity(options, COSTS, FIXED + 4 * 100 + 500)) == 4
    with pytest.raises(OptionError, match="lower max_concurrency"):
        plan_capacity(options, COSTS, FIXED + 4 * 100 + 500 - 1)


def test_the_offered_max_context_really_fits_and_the_next_page_does_not():
    free_bytes = FIXED + 6 * 100 + 500 + 50
    with pytest.raises(OptionError, match=r"fits is 384\."):
        plan_capacity(OPTIONS, COSTS, free_bytes)
    plan_capacity(dataclasses.replace(OPTIONS, max_context_tokens=384), COSTS, free_bytes)
    with pytest.raises(OptionError):
        plan_capacity(dataclasses.replace(OPTIONS, max_context_tokens=385), COSTS, free_bytes)


@pytest.mark.parametrize(("tokens", "pages"), [(640, 10), (641, 11), (1000, 16), (2560, 40)])
def test_explicit_capacity_is_taken_exactly(tokens, pages):
    options = dataclasses.replace(OPTIONS, kv_capacity_tokens=tokens)
    assert num_pages(plan_capacity(options, COSTS, 10**9)) == pages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_capacity_tokens": 576}, r"must be 640\.\.2560 tokens \(10\.\.40 pages\)"),
        ({"kv_capacity_tokens": 2561}, r"must be 640\.\.2560 tokens \(10\.\.40 pages\)"),
        (
            {"kv_capacity_tokens": 64, "max_context_tokens": 64},
            r"must be 256\.\.256 tokens",
        ),  # a page per lane
        ({"max_concurrency": 0}, r"1\.\.8"),
        ({"max_concurrency": 9}, r"1\.\.8"),
        ({"max_context_tokens": 0}, "at least 1 token"),
        ({"device_state_slots": -1}, "device_state_slots is -1"),
        ({"host_state_slots": -1}, "host_state_slots is -1"),
        ({"host_kv_bytes": -1}, "host_kv_capacity_bytes is -1"),
    ],
)
def test_contradictory_options_are_refused_with_the_bound(changes, message):
    with pytest.raises(OptionError, match=message):
        plan_capacity(dataclasses.replace(OPTIONS, **changes), COSTS, 10**9)


def test_impossible_explicit_capacity_names_the_largest_that_fits_and_is_never_lowered():
    options = dataclasses.replace(OPTIONS, kv_capacity_tokens=2560)
    free_bytes = FIXED + 25 * 100 + 99
    with pytest.raises(OptionError, match=r"largest kv_capacity that fits is 1600 tokens"):
        plan_capacity(options, COSTS, free_bytes)
    fitting = dataclasses.replace(OPTIONS, kv_capacity_tokens=1600)
    assert num_pages(plan_capacity(fitting, COSTS, free_bytes)) == 25
    with pytest.raises(OptionError):
        plan_capacity(dataclasses.replace(OPTIONS, kv_capacity_tokens=1601), COSTS, free_bytes)


def test_impossible_explicit_capacity_below_the_minimum_names_a_shorter_context():
    options = dataclasses.replace(OPTIONS, kv_capacity_tokens=640)
    with pytest.raises(OptionError, match=r"largest max_context that fits is 448\."):
        plan_capacity(options, COSTS, FIXED + 7 * 100)


def test_a_model_that_does_not_fit_at_all_says_so():
    with pytest.raises(OptionError, match="smaller model"):
        plan_capacity(OPTIONS, COSTS, 5_000)


def test_state_slots_are_one_pool_of_c_plus_h():  # CFG-04, S-1
    options = dataclasses.replace(OPTIONS, max_concurrency=2, device_state_slots=3)
    capacity = plan_capacity(options, COSTS, 10**9).capacity
    assert capacity.num_state_slots == 5
    assert capacity.num_lanes == 2


def test_pools_are_typed_and_the_host_tier_is_billed_separately():  # R-1, F-3
    options = dataclasses.replace(OPTIONS, host_state_slots=8, host_kv_bytes=1 << 30)
    with_host, without = plan_capacity(options, COSTS, 10**9), plan_capacity(OPTIONS, COSTS, 10**9)
    assert [pool.kind for pool in with_host.capacity.pools] == [PoolKind.MAIN]
    assert (with_host.capacity.num_host_state_slots, with_host.capacity.host_kv_bytes) == (8, 1 << 30)
    assert with_host.memory.planned_bytes == without.memory.planned_bytes


def test_the_memory_table_adds_up_and_prints():
    table = plan_capacity(OPTIONS, COSTS, 10**9).memory
    assert table.planned_bytes == FIXED + 40 * 100
    by_axis = {row.axis: row for row in table.rows}
    assert by_axis["main_pages"].planned_bytes == 4_000
    assert by_axis["state_slots"].planned_bytes == 400
    assert not by_axis["scratch"].persistent
    filled = table.with_allocated({"main_pages": 4_000, "weights": 10_001})
    text = filled.render()
    for axis in by_axis:
        assert axis in text
    assert filled.as_dict()["axes"]["weights"]["allocated_bytes"] == 10_001
    assert filled.as_dict()["axes"]["scratch"]["allocated_bytes"] is None


@given(
    context=st.integers(1, 100_000),
    lanes=st.integers(1, 8),
    extra=st.integers(0, 8),
    free_bytes=st.integers(0, 10**7),
    headroom=st.integers(0, 10**6),
)
def test_automatic_capacity_is_the_largest_legal_that_leaves_the_headroom(
    context, lanes, extra, free_bytes, headroom
):
    options = SizingOptions(context, lanes, None, extra, headroom_bytes=headroom)
    longest = pages_for(context)
    lowest, highest = max(longest, lanes), lanes * longest

    def fits(pages: int) -> bool:
        return fixed_cost(options, COSTS) + pages * COSTS.page_bytes + headroom <= free_bytes

    if not fits(lowest):
        with pytest.raises(OptionError):
            plan_capacity(options, COSTS, free_bytes)
        return
    pages = num_pages(plan_capacity(options, COSTS, free_bytes))
    assert lowest <= pages <= highest
    assert fits(pages)
    assert pages == highest or not fits(pages + 1)
