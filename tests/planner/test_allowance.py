"""The time rule: first window, extension, discovery, and its refusals (G-10, G-11)."""

import doctest

import pytest

from ninfer_jax.planner import allowance as subject
from ninfer_jax.planner.allowance import Allowance, Forecast, StopReason, allow, first_allowance
from ninfer_jax.planner.cost import SATURATED

MS = 1_000_000
S = 1000 * MS


def test_first_window_is_a_small_share_of_the_incumbent():
    assert first_allowance(50 * MS, 5 * MS, 80 * S).granted_ns == 5 * MS
    assert first_allowance(50 * MS, 5 * MS, 1 * MS).granted_ns == 50_000
    assert first_allowance(50 * MS, 5 * MS, 1 * MS, blocked_requests=4).granted_ns == 10_000
    assert first_allowance(3 * MS, 5 * MS, 80 * S).granted_ns == 3 * MS


def test_no_time_and_nothing_to_gain():
    assert first_allowance(0, 5 * MS, 80 * S) == StopReason.TIME_BUDGET
    assert first_allowance(50 * MS, 5 * MS, 19) == StopReason.INSUFFICIENT_EXPECTED_GAIN


def test_a_promising_search_is_extended_once_then_denied():
    start = first_allowance(50 * MS, 5 * MS, 80 * S)
    longer = allow(start, 4 * MS, Forecast(2 * MS, 3 * MS, 70 * S, True), has_progressed=True)
    assert (longer.granted_ns, longer.renewals) == (10 * MS, 1)
    later = Forecast(2 * MS, 3 * MS, 1 * MS, True)
    assert allow(longer, 9 * MS, later, has_progressed=True) == StopReason.INSUFFICIENT_EXPECTED_GAIN


def test_inside_the_window_nothing_is_asked():
    start = first_allowance(50 * MS, 5 * MS, 80 * S)
    assert allow(start, 1 * MS, Forecast(4 * MS, 99 * S, 0, False), has_progressed=False) == start


def test_plan_20_an_operation_that_cannot_fit_stops():
    start = Allowance(8, 10, 1)
    assert allow(start, 8, Forecast(3, 3, S, True), has_progressed=True) == StopReason.TIME_BUDGET


def test_plan_18_incomplete_forecast_gets_one_discovery():
    start = first_allowance(50 * MS, 5 * MS, 80 * S)
    unknown = Forecast(1 * MS, 1 * MS, 70 * S, False)
    found = allow(start, 5 * MS, unknown, has_progressed=True)
    assert (found.granted_ns, found.discovery_used, found.renewals) == (10 * MS, True, 0)
    assert allow(found, 10 * MS, unknown, has_progressed=True) == StopReason.INSUFFICIENT_EXPECTED_GAIN


@pytest.mark.parametrize(
    ("forecast", "progressed"),
    [
        (Forecast(MS, 3 * MS, SATURATED, True), True),  # a saturated gain counts as none (O-13)
        (Forecast(MS, 3 * MS, 70 * S, True), False),
        (Forecast(MS, 46 * MS, 70 * S, True), True),  # completion beyond the boundary
        (Forecast(MS, 3 * MS, -S, True), True),
    ],
)
def test_refusals(forecast, progressed):
    start = first_allowance(50 * MS, 5 * MS, 80 * S)
    got = allow(start, 5 * MS, forecast, has_progressed=progressed)
    assert got == StopReason.INSUFFICIENT_EXPECTED_GAIN


def test_doctests():
    assert doctest.testmod(subject).failed == 0
