"""What states are worth: savings, public value, private loss, and the price J of every target (O-5..O-13).

Owns: the valuation of one planning round. Reads outcomes, never decides feasibility; chooses no target.

    J(c, T) = Now(c, T) + max(0, PublicValue(I_c) - PublicValue(T)) + sum over owners of PrivateLoss(I_c, T)

What an option costs its owner is tabled in `losses`, over the recipes of `savings`; thousands of targets are
then one reference and its differences.

Letters: B targets, Q checkpoints of the problem, M checkpoints of one owner, W demand records, J items.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np
from ninfer_jax.planner.candidate import remaining_prefill
from ninfer_jax.planner.cost import (
    SATURATED,
    MachineCostModel,
    batch_ns_array,
    prefill_ns,
    saturating_sum,
    saturating_total,
)
from ninfer_jax.planner.demand import Portfolio, match_matrix
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.losses import CandidateLosses, LossBatch, make_candidate_losses, make_loss_batch
from ninfer_jax.planner.outcomes import make_outcome_tables
from ninfer_jax.planner.problem import Problem, base_tokens
from ninfer_jax.planner.projection import class_wants, fates_of, padded_codes
from ninfer_jax.planner.round_facts import CacheFacts, NewCheckpoint, make_round_facts
from ninfer_jax.planner.savings import SavingsBook
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.target import ABSENT, KEEP, TargetBatch, make_targets, take


class Retention(IntEnum):
    """Retention classes of private owners; the value is the prior w_o (O-7)."""

    DISPOSABLE = 1
    RECENT_PRIVATE = 4
    LIVE_SESSION = 16


NUM_TIE_KEYS: Final = 11


# ---------------------------------------------------------------- the rules on plain numbers


def saving(rebuild_ns: int, recovery_ns: int) -> int:
    """Returns what having a checkpoint saves against a rebuild from root (O-5)."""
    return max(0, rebuild_ns - recovery_ns)


def empirical_value(savings: np.ndarray, matches: np.ndarray) -> int:
    """Returns the sum over demands of the largest saving among matching checkpoints (O-6).

    Args:
        savings: int64[Q].
        matches: bool[Q, W].
    """
    if not len(savings):
        return 0
    return int(saturating_total(np.where(matches, savings[:, None], 0).max(0, initial=0), 0))


def private_loss(weight: int, before: np.ndarray, after: np.ndarray) -> int:
    """Returns the loss of one owner: its worst checkpoint times its prior (O-7); both int64[M]."""
    worst = int(np.maximum(before - after, 0).max(initial=0))
    return min(weight * worst, SATURATED)


def net_gain(
    public_before: int,
    public_after: int,
    private_losses: int,
    immediate_before: int,
    immediate_after: int,
    *,
    blocked_requests: int = 0,
    split_ns: int = 0,
) -> int | None:
    """Returns the net gain of a shared capture, or None if saturation forbids a verdict (O-10, O-13).

    Args:
        blocked_requests: other requests that the global transition makes wait; the capture's own counts once.
        split_ns: exact cost of an extra prefill boundary, before it is sunk.

    >>> net_gain(0, 1000, 4 * 250, 0, 0), net_gain(0, 1000, 4 * 249, 0, 0)
    (0, 4)
    """
    numbers = (public_before, public_after, private_losses, immediate_before, immediate_after, split_ns)
    delta = max(0, immediate_after - immediate_before) * (1 + blocked_requests)
    if max(*numbers, delta) >= SATURATED:
        return None
    return public_after - public_before - private_losses - delta - split_ns


# ---------------------------------------------------------------- logical facts


def make_facts(
    problem: Problem,
    *,
    portfolio: Portfolio | None = None,
    keys: Mapping[int, Hashable] | None = None,
    retention: Mapping[int, Retention] | None = None,
    hits: Mapping[int, tuple[int, int]] | None = None,
) -> CacheFacts:
    """Returns the facts of one round.

    Args:
        portfolio: demands and credits; credits name owner rows.
        keys: prefix key of each checkpoint row.
        retention: class of each private owner row; RECENT_PRIVATE where missing.
        hits: (count, last epoch) of each checkpoint row that was ever hit.
    """
    state = problem.state
    portfolio, keys, hits = portfolio or Portfolio(), keys or {}, hits or {}
    weights = np.zeros(state.num_owners, np.int64)
    weights[state.owner_kind == OwnerKind.PRIVATE] = Retention.RECENT_PRIVATE
    for owner, kind in (retention or {}).items():
        if state.owner_kind[owner] == OwnerKind.PRIVATE:
            weights[owner] = int(kind)
    credited = np.zeros(state.num_owners, bool)
    for credit in portfolio.credits:
        if isinstance(credit.owner, int) and state.owner_kind[credit.owner] == OwnerKind.SHARED:
            credited[credit.owner] = True
    rows = [int(c) for c in problem.checkpoints]
    observed = np.asarray([hits.get(c, (0, 0)) for c in rows], np.int64).reshape(-1, 2)
    return CacheFacts(
        weights,
        credited,
        match_matrix(portfolio, [keys.get(c) for c in rows]),
        observed[:, 0],
        observed[:, 1],
    )


@dataclass(frozen=True, eq=False)
class PortfolioValue:
    """Prices targets of one problem (Protocols `Value` and `TieBreak`); lives as long as the round.

    Attributes:
        losses, identity_public: made so far. These memos are the only things that change, and save only time.
    """

    problem: Problem
    facts: CacheFacts
    model: MachineCostModel
    new: NewCheckpoint | None
    prefill: np.ndarray  # int64[D], remaining prefill of each candidate
    losses: dict[int, CandidateLosses] = field(default_factory=dict)
    identity_public: dict[int, int] = field(default_factory=dict)

    @cached_property
    def book(self) -> SavingsBook:
        """Returns the savings of checkpoints; made when the first degraded target is priced."""
        facts = make_round_facts(self.problem, self.facts, self.model, self.new)
        return SavingsBook(self.problem, facts, make_outcome_tables(self.problem), self.model)

    def __call__(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B], J of every target, saturated (O-9)."""
        return saturating_sum(self.now(targets, assessment), self.future(targets))

    def now(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B], the immediate price: prefill, pressure copies, candidate copies (O-2)."""
        size = np.asarray(self.problem.state.capacity.item_bytes(), np.int64)
        t = self.model.transfer
        total = self.prefill[targets.candidate]
        if not (assessment.d2h.any() or assessment.h2d.any() or assessment.d2d.any()):
            return total
        for coefficients, ops, units in (
            (t.d2h, assessment.d2h_ops, assessment.d2h),
            (t.h2d, assessment.h2d_ops, assessment.h2d),
            (t.d2d, assessment.d2d, assessment.d2d),
        ):
            if units.any():
                num_bytes = (units * size).sum(-1)
                price = batch_ns_array(coefficients, ops.sum(-1, dtype=np.int64), num_bytes)
                total = saturating_sum(total, price)
        return total

    def future(self, targets: TargetBatch, /) -> np.ndarray:
        """Returns int64[B], FutureLoss against each candidate's identity state (O-9)."""
        if not (targets.codes > ABSENT).any():
            return np.zeros(len(targets), np.int64)  # identities lose nothing and need no tables
        return self._fold(targets, self._loss)

    def public_value(self, targets: TargetBatch, /) -> np.ndarray:
        """Returns int64[B], PublicValue of each end state (O-6)."""
        return self._fold(targets, lambda which, batch: self._public(batch))

    def private_losses(self, targets: TargetBatch, /) -> np.ndarray:
        """Returns int64[B], the summed PrivateLoss against each candidate's identity state (O-7)."""
        return self._fold(targets, lambda which, batch: batch.total(batch.table.private))

    def owner_losses(self, target: TargetBatch, /) -> dict[int, int]:
        """Returns the PrivateLoss of every owner that has one in a batch of one target."""
        batch = self._batch(int(target.candidate[0]), target)
        each = batch.gather(batch.table.private)[0, :-1]
        return {int(o): int(x) for o, x in zip(self.book.facts.owners, each, strict=True) if x}

    def tie_break(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B, 11], what decides among equal J, small wins; the codes come last (O-12)."""

        def hits(which: int, batch: LossBatch) -> np.ndarray:
            newest = batch.gather(batch.table.epoch).max(-1, initial=0)
            return np.stack([batch.total(batch.table.hits), newest], -1)

        touched = self._fold(targets, hits, width=2)
        size = np.asarray(self.problem.state.capacity.item_bytes(), np.int64)
        ops = (assessment.d2h_ops + assessment.h2d_ops + assessment.d2d).sum(-1, dtype=np.int64)
        num_bytes = ((assessment.d2h + assessment.h2d + assessment.d2d) * size).sum(-1)
        facts = np.zeros((len(self.problem.candidates), 5), np.int64)
        for d, candidate in enumerate(self.problem.candidates):
            base = base_tokens(self.problem, d)
            left = remaining_prefill(candidate.request, base)
            facts[d] = (
                left.tokens,
                left.vision_patches,
                -base,
                not candidate.is_session_binding,
                candidate.ordinal,
            )
        counts = np.stack([assessment.evictions, assessment.drops, ops, num_bytes], -1).astype(np.int64)
        return np.concatenate([touched, counts, facts[targets.candidate]], -1)

    def identity_value(self, which: int) -> int:
        """Returns PublicValue of one candidate's identity state."""
        if which not in self.identity_public:
            batch = self._batch(which, self._identity(which))
            self.identity_public[which] = int(self._public(batch)[0])
        return self.identity_public[which]

    # ---- batches

    def _fold(
        self,
        targets: TargetBatch,
        rule: Callable[[int, LossBatch], np.ndarray],
        width: int | None = None,
    ) -> np.ndarray:
        """Applies `rule` to the targets of each candidate."""
        b = len(targets)
        out = np.zeros(b if width is None else (b, width), np.int64)
        if not b:
            return out
        first = int(targets.candidate[0])
        if (targets.candidate == first).all():
            return rule(first, self._batch(first, targets))
        for which in np.unique(targets.candidate).tolist():
            rows = np.flatnonzero(targets.candidate == which)
            out[rows] = rule(which, self._batch(which, take(targets, rows)))
        return out

    def _batch(self, which: int, targets: TargetBatch) -> LossBatch:
        if which not in self.losses:
            wants = class_wants(np, self.problem.tables, padded_codes(self.problem, self._identity(which)))
            fates = fates_of(np, self.problem.tables, np.asarray([which]), *wants)
            host_only = (fates[1] & ~fates[0])[0]
            self.losses[which] = make_candidate_losses(self.book, self.facts, which, host_only)
        return make_loss_batch(self.problem, self.losses[which], targets)

    def _identity(self, which: int) -> TargetBatch:
        codes = np.full(self.problem.num_victims, KEEP, np.int32)
        source = int(self.problem.source_victim[which])
        if source >= 0:
            codes[source] = ABSENT
        return make_targets(which, codes)

    def _loss(self, which: int, batch: LossBatch) -> np.ndarray:
        total = batch.total(batch.table.private)
        before = self.identity_value(which)
        total = saturating_sum(total, np.maximum(before - self._public(batch), 0))
        if batch.table.broken.any():
            total = np.where(batch.gather(batch.table.broken).any(-1), SATURATED, total)
        return total

    def _public(self, batch: LossBatch) -> np.ndarray:
        s = batch.facts
        total = np.full(len(batch.codes), s.new_credit, np.int64)
        if len(s.record):
            total = saturating_sum(total, batch.empirical())
        if len(s.credited):
            total = saturating_sum(total, batch.total(batch.table.credit))
        return total


def make_value(
    problem: Problem,
    facts: CacheFacts,
    model: MachineCostModel,
    *,
    new: NewCheckpoint | None = None,
) -> PortfolioValue:
    """Returns the valuation of one round.

    Args:
        facts: `make_facts(problem, ...)`.
        new: checkpoint that every end state has on top (capture only).
    """
    prefill = [
        prefill_ns(model, remaining_prefill(c.request, base_tokens(problem, d)))
        for d, c in enumerate(problem.candidates)
    ]
    return PortfolioValue(problem, facts, model, new, np.asarray(prefill, np.int64))


def capture_gains(
    before: PortfolioValue,
    after: PortfolioValue,
    targets: TargetBatch,
    assessment: Assessment,
    *,
    baseline_ns: int = 0,
    blocked_requests: int = 0,
    split_ns: int = 0,
) -> np.ndarray:
    """Returns int64[B], NetGain of capture targets over the private-only baseline; 0 where unprovable (O-10).

    Args:
        before: valuation without the new checkpoint; its identity state is the baseline.
        after: the same with it.
        baseline_ns: transfers of the private-only policy at the same frontier.
        split_ns: exact extra boundary cost; 0 once the offer has arrived (then it is sunk).
    """
    public_after = after.public_value(targets)
    losses = before.private_losses(targets)
    immediate = before.now(targets, assessment) - before.prefill[targets.candidate]
    gains = []
    for b, which in enumerate(targets.candidate):
        gain = net_gain(
            int(before.identity_value(int(which))),
            int(public_after[b]),
            int(losses[b]),
            baseline_ns,
            int(immediate[b]),
            blocked_requests=blocked_requests,
            split_ns=split_ns,
        )
        gains.append(0 if gain is None else gain)
    return np.asarray(gains, np.int64)
