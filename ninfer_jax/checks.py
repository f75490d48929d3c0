"""The refusals that values from outside meet: no whole number in range, no flag, none of the choices.

Owns their wording: which field, what was got, what is expected (F-3). The bounds are each caller's own.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import SupportsIndex

from ninfer_jax.errors import OptionError

MAX_INT32 = 2**31 - 1  # counts are int32 units on device (design 2)
MAX_INT64 = 2**63 - 1  # bytes and nanoseconds
MAX_SECONDS = MAX_INT64 // 2 // 10**9  # a deadline that far ahead is still int64 nanoseconds


def checked_integer(name: str, got: object, low: int, high: int, *, expected: str | None = None) -> int:
    """Returns an integer of any kind but bool as an int.

    Args:
        name: of the field.
        got: what the caller passed.
        low, high: the bounds, both allowed.
        expected: the bounds in words, where they say more than the numbers.
    Raises:
        OptionError: if it is no integer or out of bounds.
    """
    bound = f"{low}..{high}" if expected is None else expected
    if isinstance(got, bool) or not isinstance(got, SupportsIndex):
        raise OptionError(f"{name}: got {got!r}, expected an integer, {bound}")
    number = operator.index(got)
    if not low <= number <= high:
        raise OptionError(f"{name}: got {number}, expected {bound}")
    return number


def checked_flag(name: str, got: object) -> bool:
    """Returns a bool, and nothing that merely counts as one.

    Raises:
        OptionError: if it is anything else.
    """
    if not isinstance(got, bool):
        raise OptionError(f"{name}: got {got!r}, expected True or False")
    return got


def check_choice(name: str, got: object, allowed: tuple[str, ...]) -> None:
    """Returns nothing when the value is one of the choices.

    Raises:
        OptionError: listing them.
    """
    if got not in allowed:
        raise OptionError(f"{name}: got {got!r}, expected one of {', '.join(map(repr, allowed))}")


def checked_seconds(name: str, got: object) -> float:
    """Returns a duration above zero that can be added to any clock.

    Raises:
        OptionError: if it is no number, not above zero, or beyond ``MAX_SECONDS``.
    """
    if isinstance(got, bool) or not isinstance(got, Real) or not 0 < got <= MAX_SECONDS:
        # NaN fails both comparisons
        raise OptionError(f"{name}: got {got!r}, expected seconds above 0 and at most {MAX_SECONDS}")
    return float(got)
