"""Running totals of one engine, for ``stats()``.

Owns sums only; the worker adds, everybody else gets a copy as a plain dict. Occupancy is never counted here:
the program is asked (D-2).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Counters:
    """Totals since the engine started; times in nanoseconds."""

    submitted: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    failed: Counter[str] = field(default_factory=Counter)  # by error kind
    admissions: int = 0
    backfills: int = 0  # admissions past a blocked head, under proof
    sources: Counter[str] = field(default_factory=Counter)  # what they started from
    misses: Counter[str] = field(default_factory=Counter)  # why they reused no more
    stop_reasons: Counter[str] = field(default_factory=Counter)  # of their plans (G-13)
    plans: int = 0
    planning_ns: int = 0
    restored_bytes: int = 0
    offloaded_bytes: int = 0
    blocked_assessments: int = 0
    prompt_tokens: int = 0  # of admitted requests
    reused_tokens: int = 0
    completion_tokens: int = 0
    prefill_chunks: int = 0
    prefill_ns: int = 0  # dispatch of all chunks, and for each prompt's last one the wait for its token
    decode_rounds: Counter[int] = field(default_factory=Counter)  # by number of rows
    decode_rows: int = 0
    decode_step_ns: int = 0  # dispatch to tokens on the host, a prefill chunk still running included
    decode_settle_ns: int = 0  # from tokens on the host to everything published
    faults: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns a copy as plain data."""
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            is_counter = isinstance(value, Counter)
            values[entry.name] = {str(key): value[key] for key in sorted(value)} if is_counter else value
        return values
