"""Owns what the engine asks Program to run and the four answers it can get (G-14).

It does not own the decision: `program.assess` makes it from the books.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.request import AdmissionStatus

if TYPE_CHECKING:
    from ninfer_jax.identity import PromptIdentity


__all__ = ["AdmissionStatus", "RequestWork"]


@dataclass(frozen=True)
class RequestWork:
    """The physical side of one request: what it starts from, how far it may go, how it samples."""

    identity: PromptIdentity
    max_output_tokens: int  # effective: the caller has already applied every limit of its own
    sampling: LaneSampling
