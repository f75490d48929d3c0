"""What recent requests asked for: the demand window and the shared credits (O-4, O-8).

Owns: two small logical histories as values, and how one committed request changes them. Owns no price and
no placement; a key is whatever hashable name the manager gives a prefix, and it proves nothing (C-6).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

WINDOW: Final = 32  # successful materialisations that are remembered, and that a credit lives (F-2)


@dataclass(frozen=True)
class Demand:
    """One request: its reuse domain and the prefixes it could have used.

    Attributes:
        domain: digest of the session key, or something unique for a request without one.
        matched: keys of resident checkpoints that matched exactly, chosen or not.
        creatable: keys of shared prefixes it could have published.
    """

    domain: Hashable
    matched: frozenset[Hashable] = frozenset()
    creatable: frozenset[Hashable] = frozenset()


@dataclass(frozen=True)
class SharedCredit:
    """Declared interest in one shared owner, until its first exact match or `remaining` more requests."""

    owner: Hashable
    keys: frozenset[Hashable]
    remaining: int = WINDOW


@dataclass(frozen=True)
class Portfolio:
    """The last demands, oldest first, and the credits that still count.

    >>> portfolio = grant_credit(Portfolio(), owner=3, keys=["system"])
    >>> commit_demand(portfolio, Demand("ana", frozenset(["system"]))).credits
    ()
    """

    demands: tuple[Demand, ...] = ()
    credits: tuple[SharedCredit, ...] = ()


def commit_demand(portfolio: Portfolio, demand: Demand) -> Portfolio:
    """Returns the portfolio after one materialisation published Active; an aborted one calls nothing.

    Credits whose owner matched exactly are consumed, even when another source was chosen; the others age.
    """
    aged = [replace(c, remaining=c.remaining - 1) for c in portfolio.credits if not c.keys & demand.matched]
    return Portfolio(
        (*portfolio.demands, demand)[-WINDOW:], tuple(credit for credit in aged if credit.remaining > 0)
    )


def with_provisional(portfolio: Portfolio, demand: Demand) -> Portfolio:
    """Returns the view while `demand` is being planned: its record counts, displacing the oldest when full.

    Credits are left alone: nothing has been committed yet.
    """
    return replace(portfolio, demands=(*portfolio.demands, demand)[-WINDOW:])


def grant_credit(portfolio: Portfolio, owner: Hashable, keys: Iterable[Hashable]) -> Portfolio:
    """Returns the portfolio with one fresh credit for a just published owner; evidence does not stack."""
    others = tuple(c for c in portfolio.credits if c.owner != owner)
    return replace(portfolio, credits=(*others, SharedCredit(owner, frozenset(keys))))


def without_owner(portfolio: Portfolio, owner: Hashable) -> Portfolio:
    """Returns the portfolio without the credit of an owner that is gone."""
    return replace(portfolio, credits=tuple(c for c in portfolio.credits if c.owner != owner))


def num_domains(portfolio: Portfolio, key: Hashable) -> int:
    """Returns how many independent reuse domains asked for a key (E-1)."""
    return len({d.domain for d in portfolio.demands if key in d.matched or key in d.creatable})


def match_matrix(portfolio: Portfolio, keys: Sequence[Hashable]) -> np.ndarray:
    """Returns bool[Q, D]: does demand d name the key of checkpoint q.

    Args:
        keys: one key per checkpoint; None matches nothing.
    """
    rows: dict[Hashable, list[int]] = {}
    for q, key in enumerate(keys):
        if key is not None:
            rows.setdefault(key, []).append(q)
    out = np.zeros((len(keys), len(portfolio.demands)), bool)
    for d, demand in enumerate(portfolio.demands):
        for key in demand.matched | demand.creatable:
            out[rows.get(key, []), d] = True
    return out
