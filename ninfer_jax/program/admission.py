"""Owns what the engine asks Program to run: the physical side of one request.

It does not own the answer's words (`ninfer_jax.request.AdmissionStatus`) nor the decision (`program.assess`).
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
    """What a request starts from, how far it may go and how it samples."""

    identity: PromptIdentity
    max_output_tokens: int  # effective: the caller has already applied every limit of its own
    sampling: LaneSampling
    capture_frontiers: tuple[int, ...] = ()  # where prefill stops, so that a checkpoint can be taken
