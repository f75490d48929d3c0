"""Owns the record of how tokens were executed: which steps made the state at a frontier (C-9).

Running the same steps again gives the same bits. It does not own the tokens (`identity_book`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Neighbouring tokens that one prefill chunk, or a row of decode steps, fed."""

    start_tokens: int
    num_tokens: int
    decoded: bool  # one token per step
    num_rows: int = 1  # sequences that each of these steps ran together: other kernels, other bits

    @property
    def end_tokens(self) -> int:
        """The frontier behind it."""
        return self.start_tokens + self.num_tokens


def history_up_to(history: Sequence[Segment], frontier_tokens: int) -> tuple[Segment, ...]:
    """Returns the steps that made the state at a frontier.

    Raises:
        ValueError: if a prefill chunk ran across it: no state was ever there.
    """
    kept = []
    for segment in history:
        if segment.start_tokens >= frontier_tokens:
            break
        if segment.end_tokens > frontier_tokens:
            if not segment.decoded:
                raise ValueError(f"no state at {frontier_tokens}: {segment} ran across it")
            segment = segment._replace(num_tokens=frontier_tokens - segment.start_tokens)
        kept.append(segment)
    return tuple(kept)
