"""How long one search may think: the first window, its extensions, the reasons to stop (G-10, G-11, G-13).

Owns: the rule as pure functions over numbers. Reads no clock: elapsed time and forecasts are arguments. What
it grants affects the quality of a plan only; correctness incumbents are outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from ninfer_jax.planner.cost import SATURATED

SHARE: Final = 20  # planning may cost one part in 20 of what it is expected to gain
DISCOVERY_NS: Final = 5_000_000


class StopReason(Enum):
    """Why a search ended; none of them claims that the result is optimal (G-13)."""

    NO_PRESSURE = "no candidate needs pressure or could be improved by it"
    QUEUE_EXHAUSTED = "nothing is left to try"
    TARGET_BUDGET = "the number of targets is used up"
    EXPANSION_CAPACITY = "the session can store no more targets"
    TIME_BUDGET = "the time is used up, or the next operation would not fit"
    WORK_BUDGET = "the projection work is used up"
    INSUFFICIENT_EXPECTED_GAIN = "what can still be gained does not pay for further planning"


@dataclass(frozen=True)
class Forecast:
    """What going on is expected to cost and to bring.

    Attributes:
        next_ns: the next indivisible operation.
        completion_ns: everything that is still planned.
        gain_ns: best attainable price against the current incumbent; realised gains are no longer in it.
        is_complete: False while nobody knows yet what a candidate could attain.
    """

    next_ns: int
    completion_ns: int
    gain_ns: int
    is_complete: bool


@dataclass(frozen=True)
class Allowance:
    """Time granted so far, counted from the start of the search. Build with `first_allowance`.

    Attributes:
        limit_ns: what the admission boundary has left.
        affected: requests that wait for this planning, the planned one included.
        discovery_used: whether the one grant without a forecast was given.
    """

    granted_ns: int
    limit_ns: int
    affected: int
    renewals: int = 0
    discovery_used: bool = False


def first_allowance(
    limit_ns: int, window_ns: int, incumbent_ns: int, *, blocked_requests: int = 0
) -> Allowance | StopReason:
    """Returns the first window: never more than a small share of what the incumbent costs.

    >>> first_allowance(50_000_000, 5_000_000, 1_000_000).granted_ns
    50000
    """
    affected = 1 + blocked_requests
    if limit_ns <= 0:
        return StopReason.TIME_BUDGET
    share = incumbent_ns // SHARE // affected
    if share == 0:
        return StopReason.INSUFFICIENT_EXPECTED_GAIN
    return Allowance(min(window_ns, share, limit_ns), limit_ns, affected)


def allow(
    allowance: Allowance, used_ns: int, forecast: Forecast, *, has_progressed: bool
) -> Allowance | StopReason:
    """Returns the allowance under which the next operation may run, extended if needed, or why to stop.

        inside the window                     -> as it is
        does not fit into the boundary's rest -> TIME_BUDGET
        forecast incomplete, first time       -> one discovery
        completion <= gain / 20 / affected    -> the window doubles
        else                                  -> INSUFFICIENT_EXPECTED_GAIN

    Args:
        has_progressed: whether anything was assessed since the last extension.
    """
    if used_ns + forecast.next_ns <= allowance.granted_ns:
        return allowance
    rest = allowance.limit_ns - used_ns
    if forecast.next_ns > rest:
        return StopReason.TIME_BUDGET
    if not forecast.is_complete and not allowance.discovery_used and forecast.next_ns <= DISCOVERY_NS:
        granted = min(used_ns + DISCOVERY_NS, allowance.limit_ns)
        return replace(allowance, granted_ns=granted, discovery_used=True)
    gain = 0 if forecast.gain_ns >= SATURATED else max(forecast.gain_ns, 0)
    pays = forecast.is_complete and forecast.completion_ns <= min(gain // SHARE // allowance.affected, rest)
    longer = min(2 * allowance.granted_ns, allowance.limit_ns)
    if not pays or not has_progressed or used_ns + forecast.next_ns > longer:
        return StopReason.INSUFFICIENT_EXPECTED_GAIN
    return replace(allowance, granted_ns=longer, renewals=allowance.renewals + 1)
