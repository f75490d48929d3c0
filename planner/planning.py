"""One call that plans a materialisation: the physical half, the prices and the search, wired together.

Owns: the wiring, and the order gate -> search -> readiness. Each part is usable without it.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.functions import PhysicalFunctions
from ninfer_jax.planner.problem import (
    ImageRule,
    Problem,
    TailRule,
    identity_targets,
    maximal_targets,
)
from ninfer_jax.planner.search import SearchRound


def improvable(problem: Problem) -> np.ndarray:
    """Returns bool[D], candidates that could get cheaper by pressure although their identity fits.

    Only a consumed source whose state or tail is copied because others still hold it (G-2).
    """
    return np.asarray(
        [s.image_rule == ImageRule.BY_OTHERS or TailRule.BY_OTHERS in s.tail_rule for s in problem.sources]
    )


def search_round(problem: Problem, functions: PhysicalFunctions, recency: np.ndarray | None) -> SearchRound:
    """Returns what the search is told about a problem.

    Args:
        recency: int64[V], newest hit or publication of each victim, -1 for none; None switches G-7 off.
    """
    return SearchRound(
        identity_targets(problem),
        maximal_targets(problem),
        problem.tables.capacity,
        improvable(problem),
        recency,
        functions.successor_tables.demote_all,
        problem.num_options,
    )
