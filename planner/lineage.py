"""Which checkpoints survive when a request consumes a private source (N-9, O-11).

Owns: that one rule. The conversation is rewritten from the reuse base: the endpoint and everything above the
base go; what lies at or below it stays as checkpoints of the new lineage.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.ids import CheckpointKind, OwnerId
from ninfer_jax.planner.state import PhysicalState, checkpoints_of


def surviving_checkpoints(state: PhysicalState, source: int, rows: np.ndarray | None = None) -> np.ndarray:
    """Returns bool[M] over `checkpoints_of(owner)`: what stays when checkpoint row `source` is consumed.

    A consumed endpoint becomes the active state itself; a consumed anchor or rewrite checkpoint stays, so
    that its image is forked, not moved.

    Args:
        rows: `checkpoints_of(owner)`, if the caller has them.
    """
    if rows is None:
        rows = checkpoints_of(state, OwnerId(int(state.checkpoint_owner[source])))
    below = state.checkpoint_frontier[rows] <= state.checkpoint_frontier[source]
    # the sequence writes from the typed base on: what a pool holds above it cannot be kept either
    below &= (state.checkpoint_kv_tokens[rows] <= state.checkpoint_kv_tokens[source]).all(1)
    return below & (state.checkpoint_kind[rows] != CheckpointKind.SESSION_ENDPOINT)
