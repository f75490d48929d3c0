"""Owns the value that stands for one executed, uncommitted model step (Q-5).

It does not own the commit: Program consumes a batch whole, exactly once, by `commit` or `abort`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ninfer_jax.program.executor import Logprobs, StepResult
from ninfer_jax.request import SequenceHandle


@dataclass(frozen=True, eq=False)
class PendingBatch:
    """Tokens that were drawn and belong to nobody yet."""

    serial: int
    handles: tuple[SequenceHandle, ...]  # one per row, B
    produced: tuple[int, ...]  # tokens each row may accept
    fed_tokens: (
        int  # tokens each row's KV and state advance by when it is committed: 1 in decode, 0 after prefill
    )
    result: StepResult

    def tokens(self) -> np.ndarray:
        """Returns int32[B], the drawn tokens; blocks until the device is done."""
        return self.result.tokens()

    def logprobs(self) -> Logprobs:
        """Returns the log-probabilities of this step; blocks until the device is done."""
        return self.result.logprobs()
