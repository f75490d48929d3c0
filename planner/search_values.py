"""The values that go into a search and come out of it (G-2..G-14).

Owns: the round's description, the injected functions as one bundle, the result and the reasons in it. Owns no
strategy.

Letters: D candidates, V victims, R axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from ninfer_jax.planner.allowance import StopReason
from ninfer_jax.planner.search_types import (
    Adoptable,
    Assess,
    Assessment,
    Confirm,
    Successors,
    TieBreak,
    Value,
)
from ninfer_jax.planner.target import TargetBatch, take


class SearchPhase(Enum):
    """Where a search stopped."""

    NONE = "before any optional work"
    CONSTRUCTION = "building combinations for the candidates"
    REFINEMENT = "changing single owners of the incumbent"
    EXPANSION = "enumerating further combinations"


class Rejection(Enum):
    """Why a candidate was not chosen."""

    PRICE = "costs more"
    DOES_NOT_FIT = "no target of it was found that fits"
    NOT_ADOPTABLE = "fits, but cannot be published"
    ARENA = "fits by numbers, but the Host arena has no hole for its copies"


@dataclass(frozen=True, eq=False)
class PressureDomain:
    """What a search asks for once it puts somebody under pressure.

    Attributes:
        maximal: one target per candidate that releases all it may.
        preserve_codes: int32[V], option that demotes the whole owner to Host, KEEP where there is none; only
            the recency ladder and what it leaves unlicensed use it.
    """

    maximal: TargetBatch
    preserve_codes: np.ndarray


@dataclass(frozen=True, eq=False)
class SearchRound:
    """What a search is told about one round.

    Attributes:
        identities: one target per candidate, root first.
        capacity: int32[R], to read the assessments' occupancy.
        improvable: bool[D], candidates whose identity fits but could get cheaper by pressure (G-2).
        num_options: option codes are below this.
        domain: makes the pressure domain; never called if the identities settle the round (G-2).
        recency: int64[V], newest hit or publication of each victim, -1 for none; None switches G-7 off.
    """

    identities: TargetBatch
    capacity: np.ndarray
    improvable: np.ndarray
    num_options: int
    domain: Callable[[], PressureDomain]
    recency: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class SearchFunctions:
    """The injected half (design 3.4)."""

    assess: Assess
    confirm: Confirm
    successors: Successors
    value: Value
    tie_break: TieBreak
    adoptable: Adoptable


@dataclass(frozen=True, eq=False)
class Found:
    """One assessed target; arrays have one row."""

    target: TargetBatch
    assessment: Assessment
    price_ns: int


@dataclass(frozen=True, eq=False)
class Rejected:
    """The best target of a candidate that lost, and why."""

    found: Found
    reason: Rejection


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Outcome of one search.

    Attributes:
        best: the target to seal, or None if not even root maximal is adoptable.
        is_fallback: `best` is the correctness incumbent of G-4, which releases everything.
        first: the incumbent before optional work.
        rejected: one entry per other candidate, cheapest first.
        num_targets: distinct targets assessed inside the budgets.
        num_cells: (target, owner) cells projected inside the budgets.
        num_improvements: how often the incumbent got better.
        licensed: bool[V], owners that could be evicted whole.
    """

    best: Found | None
    stop: StopReason
    phase: SearchPhase
    is_fallback: bool
    first: Found | None
    rejected: tuple[Rejected, ...]
    num_targets: int
    num_cells: int
    num_improvements: int
    granted_ns: int
    renewals: int
    used_ns: int
    licensed: np.ndarray


def rows_of(assessment: Assessment, rows: np.ndarray | slice) -> Assessment:
    """Returns the assessment of some rows (indices, a mask or a slice)."""
    return Assessment(**{name: array[rows] for name, array in vars(assessment).items()})


def found_at(targets: TargetBatch, assessment: Assessment, price_ns: int, row: int) -> Found:
    """Returns one row of an assessed batch."""
    one = slice(row, row + 1)
    return Found(take(targets, one), rows_of(assessment, one), price_ns)
