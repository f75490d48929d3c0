"""Owns what the engine asks Program to run and the four answers it can get (G-14).

It does not own the decision: `program.assess` makes it from the books.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ninfer_jax.program.lane_sampling import LaneSampling

if TYPE_CHECKING:
    from ninfer_jax.identity import PromptIdentity


class AdmissionStatus(Enum):
    """Whether a request can become Active now; exactly these four (G-14)."""

    PERMANENTLY_INFEASIBLE = "permanently_infeasible"  # not even alone, from root, on an empty device (G-5)
    TEMPORARILY_BLOCKED = "temporarily_blocked"  # lanes, active guarantees or a transition are in the way
    NEEDS_TRANSFER = "needs_transfer"  # feasible after copies between tiers
    READY = "ready"


@dataclass(frozen=True)
class RequestWork:
    """The physical side of one request: what it starts from, how far it may go, how it samples."""

    identity: PromptIdentity
    max_output_tokens: int  # effective: the caller has already applied every limit of its own
    sampling: LaneSampling
