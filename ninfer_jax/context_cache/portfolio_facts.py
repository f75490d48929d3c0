"""What the planner is told about owners and checkpoints: priors, keys, hits, recency, demand (O-4..O-8).

Owns the translation from the manager's records into rows of one planning round. Prices nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ninfer_jax.context_cache.captures import DECLARED, CaptureIntent
from ninfer_jax.context_cache.catalog import entries
from ninfer_jax.context_cache.records import CacheState, summaries
from ninfer_jax.context_cache.request_facts import RequestFacts, reuse_domain
from ninfer_jax.context_cache.shortlist import Shortlist
from ninfer_jax.planner.demand import Demand, Portfolio, num_domains
from ninfer_jax.planner.portfolio import CacheFacts, make_facts
from ninfer_jax.planner.problem import Problem
from ninfer_jax.reuse import PrefixKey


def demand_of(facts: RequestFacts, found: Shortlist, proposals: Iterable[CaptureIntent]) -> Demand | None:
    """Returns the request's demand record; None if it takes no part (C-10)."""
    if not facts.participates:
        return None
    creatable = frozenset(facts.digests.key(c.frontier_tokens) for c in proposals if c.is_shared)
    return Demand(reuse_domain(facts), found.keys, creatable)


def facts_of(state: CacheState, problem: Problem, portfolio: Portfolio) -> CacheFacts:
    """Returns the logical facts of one round."""
    keys = {int(c.row): c.key for summary in summaries(state) for c in summary.checkpoints}
    retention, hits = {}, {}
    for _, entry in entries(state.catalog):
        retention[int(entry.summary.owner)] = entry.retention
        for c in entry.summary.checkpoints:
            hit = entry.hits.get((c.ref.kind, c.ref.ordinal))
            if hit is not None:
                hits[int(c.row)] = (hit.num_hits, hit.last_epoch)
    return make_facts(problem, portfolio=portfolio, keys=keys, retention=retention, hits=hits)


def recency_of(state: CacheState, num_owners: int) -> np.ndarray:
    """Returns int64[O], newest hit or publication of each owner row, -1 for rows without an entry (G-7)."""
    recency = np.full(num_owners, -1, np.int64)
    for _, entry in entries(state.catalog):
        recency[int(entry.summary.owner)] = entry.recency
    return recency


def may_publish(intent: CaptureIntent, key: PrefixKey, portfolio: Portfolio) -> bool:
    """Returns whether the evidence lets a shared candidate compete (E-1): declared, or seen twice."""
    return bool(intent.evidence & DECLARED) or num_domains(portfolio, key) >= 2
