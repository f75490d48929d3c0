"""Owns the choice of capacity: options, unit costs and free memory in, capacity and memory table out (K-9).

It does not own measuring (`free_memory`, `unit_costs`) nor allocating (`execution`). Everything here is
arithmetic on plain integers, so it runs before any weight is read.

Letters: P = 64 tokens of a page, C lanes, H extra state slots, L = ceil(max_context / P) pages of the longest
sequence, M main pages, F free bytes, R headroom bytes, B(M) = fixed + M * step bytes reserved in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer_jax.errors import OptionError
from ninfer_jax.options import MAX_CONCURRENCY, PAGE_TOKENS
from ninfer_jax.program.capacity import CapacityVector, PoolCapacity, PoolKind, pages_for
from ninfer_jax.program.memory_table import (
    HOST_PAGES,
    HOST_STATES,
    SAMPLER,
    SCRATCH,
    STATE_SLOTS,
    WEIGHTS,
    MemoryRow,
    MemoryTable,
    format_bytes,
    pool_axis,
)


@dataclass(frozen=True)
class SizingOptions:
    """What the user asked for, already normalised (cache off means no extra slots and no host tier)."""

    max_context_tokens: int
    max_concurrency: int  # C
    kv_capacity_tokens: int | None  # None: automatic
    device_state_slots: int  # H
    headroom_bytes: int  # R, what automatic sizing leaves to others
    host_state_slots: int = 0
    host_kv_bytes: int = 0
    keeps_context: bool = True  # False: the cache is off


@dataclass(frozen=True)
class UnitCosts:
    """What one unit of each axis costs on the device for a given model."""

    weights_bytes: int  # all weights
    page_bytes: int  # one main page group
    state_image_bytes: int  # one state slot
    sampler_row_bytes: int  # one lane's bias, seen flags and counts
    scratch_bytes: int  # the most that any step needs while it runs


@dataclass(frozen=True)
class SizingPlan:
    """A capacity vector and the bytes behind it."""

    capacity: CapacityVector
    memory: MemoryTable


def plan_capacity(options: SizingOptions, costs: UnitCosts, free_bytes: int) -> SizingPlan:
    """Returns how many pages and slots to allocate.

    M lies in [max(L, C), C * L]: below, the longest request or one page per lane would not fit; above, no set
    of active requests could ever use it. An explicit capacity is taken exactly or refused, never lowered.

    Args:
        options: validated by the engine's options; the bounds that sizing itself relies on are checked again.
        costs: unit costs of this model.
        free_bytes: F, device memory free before weights are loaded.

    Raises:
        OptionError: naming what was asked, what is free and the largest that would fit.
    """
    lanes = options.max_concurrency
    if not 1 <= lanes <= MAX_CONCURRENCY:
        raise OptionError(f"max_concurrency is {lanes}; it must be 1..{MAX_CONCURRENCY}")
    if options.max_context_tokens < 1:
        raise OptionError(f"max_context is {options.max_context_tokens}; it must be at least 1 token")
    for name, value in (
        ("device_state_slots", options.device_state_slots),
        ("host_state_slots", options.host_state_slots),
        ("host_kv_capacity_bytes", options.host_kv_bytes),
    ):
        if value < 0:
            raise OptionError(f"{name} is {value}; it must not be negative")
    longest_pages = pages_for(options.max_context_tokens)
    min_pages, max_pages = max(longest_pages, lanes), lanes * longest_pages
    fixed_bytes = fixed_cost(options, costs)
    step_bytes = costs.page_bytes
    if options.kv_capacity_tokens is None:
        num_pages = _automatic_pages(options, costs, free_bytes, min_pages, max_pages)
    else:
        num_pages = _explicit_pages(options, free_bytes, fixed_bytes, step_bytes, min_pages, max_pages)
    capacity = CapacityVector(
        num_lanes=lanes,
        max_context_tokens=options.max_context_tokens,
        num_state_slots=lanes + options.device_state_slots,
        state_image_bytes=costs.state_image_bytes,
        pools=(PoolCapacity(PoolKind.MAIN, num_pages, costs.page_bytes),),
        num_host_state_slots=options.host_state_slots,
        host_kv_bytes=options.host_kv_bytes,
        keeps_context=options.keeps_context,
    )
    return SizingPlan(capacity, _memory_table(capacity, costs, free_bytes, options.headroom_bytes))


def fixed_cost(options: SizingOptions, costs: UnitCosts) -> int:
    """Returns the bytes that do not depend on the number of pages: weights, states, sampler rows, scratch."""
    return (
        costs.weights_bytes
        + (options.max_concurrency + options.device_state_slots) * costs.state_image_bytes
        + options.max_concurrency * costs.sampler_row_bytes
        + costs.scratch_bytes
    )


def _automatic_pages(
    options: SizingOptions, costs: UnitCosts, free_bytes: int, min_pages: int, max_pages: int
) -> int:
    fixed_bytes = fixed_cost(options, costs)
    minimum_bytes = fixed_bytes + min_pages * costs.page_bytes  # B_min
    spare_bytes = free_bytes - options.headroom_bytes - minimum_bytes
    if spare_bytes < 0:
        raise OptionError(
            f"max_context {options.max_context_tokens} with max_concurrency {options.max_concurrency} needs "
            f"at least {format_bytes(minimum_bytes)} plus {format_bytes(options.headroom_bytes)} headroom; "
            f"{format_bytes(free_bytes)} are free. "
            + _advice(options, free_bytes - options.headroom_bytes, fixed_bytes, costs.page_bytes)
        )
    return min(max_pages, min_pages + spare_bytes // costs.page_bytes)


def _explicit_pages(
    options: SizingOptions, free_bytes: int, fixed_bytes: int, step_bytes: int, min_pages: int, max_pages: int
) -> int:
    asked_tokens = options.kv_capacity_tokens
    assert asked_tokens is not None
    num_pages = pages_for(asked_tokens)
    if not min_pages <= num_pages <= max_pages:
        raise OptionError(
            f"kv_capacity is {asked_tokens} tokens ({num_pages} pages); with max_context "
            f"{options.max_context_tokens} and max_concurrency {options.max_concurrency} it must be "
            f"{min_pages * PAGE_TOKENS}..{max_pages * PAGE_TOKENS} tokens ({min_pages}..{max_pages} pages)"
        )
    needed_bytes = fixed_bytes + num_pages * step_bytes
    if needed_bytes > free_bytes:
        fitting_pages = (free_bytes - fixed_bytes) // step_bytes
        if fitting_pages >= min_pages:
            advice = f"The largest kv_capacity that fits is {fitting_pages * PAGE_TOKENS} tokens."
        else:
            advice = _advice(options, free_bytes, fixed_bytes, step_bytes)
        raise OptionError(
            f"kv_capacity {asked_tokens} tokens needs {format_bytes(needed_bytes)}; "
            f"{format_bytes(free_bytes)} are free. {advice}"
        )
    return num_pages


def _advice(options: SizingOptions, usable_bytes: int, fixed_bytes: int, step_bytes: int) -> str:
    fitting_pages = (usable_bytes - fixed_bytes) // step_bytes
    if fitting_pages >= options.max_concurrency:
        return f"The largest max_context that fits is {fitting_pages * PAGE_TOKENS}."
    return (
        f"Weights, states and scratch alone take {format_bytes(fixed_bytes)}: lower max_concurrency or "
        "device_state_slots, or use a smaller model."
    )


def _memory_table(
    capacity: CapacityVector, costs: UnitCosts, free_bytes: int, headroom_bytes: int
) -> MemoryTable:
    return MemoryTable(
        rows=(
            MemoryRow(WEIGHTS, 1, "model", costs.weights_bytes, persistent=True),
            *(
                MemoryRow(
                    pool_axis(pool.kind.value), pool.num_pages, "64 tokens", pool.page_bytes, persistent=True
                )
                for pool in capacity.pools
            ),
            MemoryRow(
                STATE_SLOTS, capacity.num_state_slots, "state image", costs.state_image_bytes, persistent=True
            ),
            MemoryRow(SAMPLER, capacity.num_lanes, "lane", costs.sampler_row_bytes, persistent=True),
            MemoryRow(SCRATCH, 1, "step", costs.scratch_bytes, persistent=False),
        ),
        free_bytes=free_bytes,
        headroom_bytes=headroom_bytes,
        host_rows=_host_rows(capacity),
    )


def _host_rows(capacity: CapacityVector) -> tuple[MemoryRow, ...]:
    page_bytes, image_bytes = capacity.pools[0].page_bytes, capacity.state_image_bytes
    rows = (
        MemoryRow(HOST_PAGES, capacity.num_host_pages, "64 tokens", page_bytes, persistent=True),
        MemoryRow(HOST_STATES, capacity.num_host_state_slots, "state image", image_bytes, persistent=True),
    )
    return tuple(row for row in rows if row.num_units)
