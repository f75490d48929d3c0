"""What states are worth: savings, public value, private loss, and the price J of every target (O-5..O-13).

Owns: the valuation of one planning round. Reads outcomes, never decides feasibility; chooses no target.

    J(c, T) = Now(c, T) + max(0, PublicValue(I_c) - PublicValue(T)) + sum over owners of PrivateLoss(I_c, T)

A checkpoint's fate depends on its own owner's option, on the candidate, and on which shared classes end up on
Host only. The last two are few per round, so savings are tabled per (owner, option) for each *pattern* of
them; thousands of targets are then gathers and sums. A pattern is tabled when it is first met.

Letters: B targets, Q checkpoints of the problem, V victims, K options, U owners with checkpoints, M
checkpoints of one owner, C classes, N pools, W demand records, L (record, owner) pairs, J items.
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
    EXACT_FLOAT,
    SATURATED,
    MachineCostModel,
    batch_ns_array,
    prefill_ns,
    prefill_ns_array,
    saturating_product,
    saturating_sum,
    saturating_total,
)
from ninfer_jax.planner.demand import Portfolio, match_matrix
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.outcomes import OutcomeTables, make_outcome_tables
from ninfer_jax.planner.problem import Problem, base_tokens
from ninfer_jax.planner.projection import class_fates
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.target import ABSENT, KEEP, TargetBatch


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


@dataclass(frozen=True, eq=False)
class CacheFacts:
    """What the manager knows about owners and checkpoints, as arrays. Build with `make_facts`."""

    weights: np.ndarray  # int64[O], prior of private owners, 0 for shared ones
    credited: np.ndarray  # bool[O], shared owners with a live credit
    matches: np.ndarray  # bool[Q, W], demand records that name the checkpoint
    hits: np.ndarray  # int64[Q], observed selected hits
    last_hit: np.ndarray  # int64[Q], epoch of the last one


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
class NewCheckpoint:
    """The shared checkpoint that a capture would add to every end state (O-10).

    Attributes:
        saving_ns: rebuild minus cheapest recovery of the captured checkpoint.
        matches: bool[W], demand records that name its key.
        is_credited: whether its evidence is declared (O-8).
    """

    saving_ns: int
    matches: np.ndarray
    is_credited: bool


# ---------------------------------------------------------------- tables of a round


@dataclass(frozen=True, eq=False)
class _Static:
    """Placement-free facts of a round."""

    owners: np.ndarray  # int32[U]
    index: np.ndarray  # int32[U, M], row of `problem.checkpoints`, Q where padded
    rebuild: np.ndarray  # int64[Q + 1]
    interval: np.ndarray  # int64[U, M, M], prefill from checkpoint j to i; SATURATED unless j is below i
    tail_ops: np.ndarray  # int64[Q]
    tail_bytes: np.ndarray  # int64[Q]
    owner_of: np.ndarray  # int32[V], row among U of each victim
    is_crowded: np.ndarray  # bool[V], shares a record with another owner
    victim: np.ndarray  # int32[U + 1], column of the extended codes; V for owners outside of the domain
    weights: np.ndarray  # int64[U]
    credited: np.ndarray  # int32[X], rows among U
    record: np.ndarray  # int32[L], demand groups, ascending
    record_owner: np.ndarray  # int32[L], row among U
    record_mask: np.ndarray  # bool[L, M]; row U of the owners is the new checkpoint of a capture
    new_saving: int
    new_credit: int
    record_starts: np.ndarray  # int32[G]
    record_count: np.ndarray  # int64[G], how many records are alike


@dataclass(frozen=True, eq=False)
class _Codes:
    """Option codes, and the places where something is degraded."""

    all: np.ndarray  # int32[B, V], ABSENT read as KEEP
    rows: np.ndarray  # int64[n], target
    owners: np.ndarray  # int64[n], victim
    codes: np.ndarray  # int32[n]
    starts: np.ndarray  # int64[B + 1], where each target's places begin


def _make_codes(codes: np.ndarray) -> _Codes:
    rows, owners = np.nonzero(codes)
    starts = np.searchsorted(rows, np.arange(len(codes) + 1))
    return _Codes(codes, rows, owners, codes[rows, owners], starts)


def _select(codes: _Codes, mask: np.ndarray) -> _Codes:
    """Returns the codes of the targets in `mask` (bool[B])."""
    keep = mask[codes.rows]
    rows = (np.cumsum(mask) - 1)[codes.rows[keep]]
    starts = np.searchsorted(rows, np.arange(int(mask.sum()) + 1))
    return _Codes(codes.all[mask], rows, codes.owners[keep], codes.codes[keep], starts)


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Values under one candidate and one set of Host-only classes."""

    private: np.ndarray  # int64[U, K]
    empirical: np.ndarray  # int64[L, K]
    lone_change: np.ndarray  # int64[V, K], change of the empirical value if only this owner changes
    credit: np.ndarray  # int64[X, K]
    affected_hits: np.ndarray  # int64[U, K], checkpoints with observed hits that got worse
    affected_epoch: np.ndarray  # int64[U, K], newest of their hits
    broken: np.ndarray  # bool[U, K], something saturated and something got worse: the loss is the maximum


@dataclass(frozen=True, eq=False)
class PortfolioValue:
    """Prices targets of one problem (Protocols `Value` and `TieBreak`); lives as long as the round.

    Attributes:
        patterns: tables already made. These memos are the only things that change, and they only save time.
    """

    problem: Problem
    facts: CacheFacts
    model: MachineCostModel
    new: NewCheckpoint | None
    prefill: np.ndarray  # int64[D], remaining prefill of each candidate
    patterns: dict[tuple[int, bytes], _Pattern] = field(default_factory=dict)
    identities: dict[int, _Identity] = field(default_factory=dict)
    identity_host_only: dict[int, np.ndarray] = field(default_factory=dict)
    savings: dict[bytes, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @cached_property
    def outcome(self) -> OutcomeTables:
        """Returns the fates of checkpoints; made when the first degraded target is priced."""
        return make_outcome_tables(self.problem)

    @cached_property
    def static(self) -> _Static:
        """Returns the placement-free facts; made when the first degraded target is priced."""
        return _make_static(self.problem, self.facts, self.model, self.new)

    def __call__(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B], J of every target, saturated (O-9)."""
        return saturating_sum(self.now(targets, assessment), self.future(targets))

    def now(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B], the immediate price: prefill, pressure copies, candidate copies (O-2)."""
        size = np.asarray(self.problem.state.capacity.item_bytes(), np.int64)
        t = self.model.transfer
        total = self.prefill[targets.candidate]
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
        return self._fold(targets, lambda which, pattern, codes: self._public(pattern, codes))

    def private_losses(self, targets: TargetBatch, /) -> np.ndarray:
        """Returns int64[B], the summed PrivateLoss against each candidate's identity state (O-7)."""

        def private(which: int, pattern: _Pattern, codes: _Codes) -> np.ndarray:
            return self._owner_sum(pattern.private, codes)

        return self._fold(targets, private)

    def owner_losses(self, target: TargetBatch, /) -> dict[int, int]:
        """Returns the PrivateLoss of every owner that has one in a batch of one target."""
        seen: list[np.ndarray] = []

        def each(which: int, pattern: _Pattern, codes: _Codes) -> np.ndarray:
            seen.append(_gather(pattern.private, self._owner_codes(codes))[0])
            return np.zeros(len(codes.all), np.int64)

        self._fold(target, each)
        return {int(o): int(x) for o, x in zip(self.static.owners, seen[0], strict=True) if x}

    def tie_break(self, targets: TargetBatch, assessment: Assessment, /) -> np.ndarray:
        """Returns int64[B, 11], what decides among equal J, small wins; the codes come last (O-12)."""

        def hits(which: int, pattern: _Pattern, codes: _Codes) -> np.ndarray:
            count = self._owner_sum(pattern.affected_hits, codes)
            newest = _gather(pattern.affected_epoch, self._owner_codes(codes)).max(-1, initial=0)
            return np.stack([count, newest], -1)

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
        return int(self._identity(which).public)

    # ---- gathers

    def _fold(
        self,
        targets: TargetBatch,
        rule: Callable[[int, _Pattern, _Codes], np.ndarray],
        width: int | None = None,
    ) -> np.ndarray:
        """Applies `rule` to each group of targets that share candidate and pattern."""
        b = len(targets)
        out = np.zeros(b if width is None else (b, width), np.int64)
        codes = np.where(targets.codes == ABSENT, KEEP, targets.codes)
        everything = _make_codes(codes)
        keys, moved = self._groups(targets, everything)
        groups = np.unique(keys)
        for key in groups.tolist():
            which, kind = divmod(key, b + 1)
            host_only = moved[kind - 1] if kind else self._identity_host_only(which)
            pattern = self._pattern(which, host_only)
            if len(groups) == 1:
                return rule(which, pattern, everything)
            rows = keys == key
            out[rows] = rule(which, pattern, _select(everything, rows))
        return out

    def _groups(self, targets: TargetBatch, codes: _Codes) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[B] and bool[n, C]: key ``candidate * (B + 1)``, plus 1 + i where row i of the second
        says which classes are kept on Host only; without it the identity's pattern holds.

        A class can leave the Device only when everybody who needs it there has changed.
        """
        problem, b = self.problem, len(targets)
        keys = targets.candidate.astype(np.int64) * (b + 1)
        if not (problem.objects.class_of >= 0).any():
            return keys, np.zeros((0, 0), bool)
        releases = self._touches[codes.owners, codes.codes]
        changed = np.bincount(codes.rows[releases], minlength=b)
        absent = (problem.source_victim >= 0)[targets.candidate]
        touched = np.flatnonzero((changed > 0) & (changed + absent >= self._least_release))
        if not len(touched):
            return keys, np.zeros((0, 0), bool)
        padded = np.zeros((len(touched), problem.tables.contributions.shape[0]), np.int32)
        padded[:, : problem.num_victims] = targets.codes[touched]
        moved = self._fates(targets.candidate[touched], padded)
        keys[touched] += 1 + _equal_rows(moved)
        return keys, moved

    @cached_property
    def _least_release(self) -> int:
        """Returns how many holders must change at least before any shared class can end up elsewhere."""
        tables = self.problem.tables
        c = np.arange(len(tables.class_device))
        bits = [
            (mask[:, KEEP][:, c // 32] >> (c % 32).astype(np.uint32)) & 1
            for mask in (tables.device_mask, tables.host_mask)
        ]
        counts = np.stack([bits[0].sum(0), (bits[0] | bits[1]).sum(0)])[:, ~tables.fixed_device]
        return int(counts[counts > 0].min(initial=len(tables.device_mask)))

    @cached_property
    def _touches(self) -> np.ndarray:
        """Returns bool[V, K], options that need another set of shared classes than KEEP does."""
        tables = self.problem.tables
        other = (tables.device_mask != tables.device_mask[:, :1]) | (
            tables.host_mask != tables.host_mask[:, :1]
        )
        return other.any(-1)

    def _fates(self, candidate: np.ndarray, padded: np.ndarray) -> np.ndarray:
        on_device, on_host, *_ = class_fates(np, self.problem.tables, candidate, padded)
        return on_host & ~on_device

    def _identity_host_only(self, which: int) -> np.ndarray:
        """Returns bool[C] of one candidate's identity state."""
        if which not in self.identity_host_only:
            code = np.zeros((1, self.problem.tables.contributions.shape[0]), np.int32)
            row = int(self.problem.source_victim[which])
            if row >= 0:
                code[0, row] = ABSENT
            self.identity_host_only[which] = self._fates(np.asarray([which]), code)[0]
        return self.identity_host_only[which]

    def _loss(self, which: int, pattern: _Pattern, codes: _Codes) -> np.ndarray:
        total = self._owner_sum(pattern.private, codes)
        before = self._identity(which).public
        total = saturating_sum(total, np.maximum(before - self._public(pattern, codes), 0))
        if pattern.broken.any():
            broken = pattern.broken[np.arange(len(pattern.broken)), self._owner_codes(codes)]
            total = np.where(broken.any(-1), SATURATED, total)
        return total

    def _owner_codes(self, codes: _Codes) -> np.ndarray:
        """Returns int32[B, U]; owners outside of the domain keep."""
        return np.pad(codes.all, ((0, 0), (0, 1)))[:, self.static.victim[:-1]]

    def _owner_sum(self, table: np.ndarray, codes: _Codes) -> np.ndarray:
        """Returns int64[B], the sum over owners of ``table[u, code]``; int64[U, K], non-negative.

        Most owners keep, so the sum over KEEP is corrected at the few places where a code differs.
        """
        if float(table.max(initial=0)) * (len(codes.rows) + len(table)) >= EXACT_FLOAT:
            return saturating_total(_gather(table, self._owner_codes(codes)), -1)
        change = table - table[:, :1]
        running = np.concatenate([[0], np.cumsum(change[self.static.owner_of[codes.owners], codes.codes])])
        return table[:, KEEP].sum() + running[codes.starts[1:]] - running[codes.starts[:-1]]

    def _public(self, pattern: _Pattern, codes: _Codes) -> np.ndarray:
        s = self.static
        total = np.full(len(codes.all), s.new_credit, np.int64)
        if len(s.record):
            total = saturating_sum(total, self._empirical(pattern, codes))
        if len(s.credited):
            extended = np.pad(codes.all, ((0, 0), (0, 1)))
            credit = saturating_total(_gather(pattern.credit, extended[:, s.victim[s.credited]]), -1)
            total = saturating_sum(total, credit)
        return total

    def _empirical(self, pattern: _Pattern, codes: _Codes) -> np.ndarray:
        """Returns int64[B], the empirical value (O-6).

        Changes of owners that share no record add up; only rows in which two of the others changed are
        computed in full.
        """
        s = self.static
        keep = np.zeros((1, codes.all.shape[1]), np.int32)
        base = int(self._empirical_of(pattern, keep)[0])
        if float(base) * (len(codes.rows) + 1) >= EXACT_FLOAT:
            return self._empirical_of(pattern, codes.all)
        change = pattern.lone_change[codes.owners, codes.codes]
        running = np.concatenate([[0], np.cumsum(change)])
        total = base + running[codes.starts[1:]] - running[codes.starts[:-1]]
        entangled = np.bincount(codes.rows[s.is_crowded[codes.owners]], minlength=len(total)) > 1
        rows = np.flatnonzero(entangled)
        if len(rows):
            total[rows] = self._empirical_of(pattern, codes.all[rows])
        return total

    def _empirical_of(self, pattern: _Pattern, codes: np.ndarray) -> np.ndarray:
        s = self.static
        each = _gather(pattern.empirical, np.pad(codes, ((0, 0), (0, 1)))[:, s.victim[s.record_owner]])
        best = np.maximum.reduceat(each, s.record_starts, axis=1)
        return saturating_total(saturating_product(best, s.record_count), -1)

    # ---- tables

    def _identity(self, which: int) -> _Identity:
        if which not in self.identities:
            host_only = self._identity_host_only(which)
            savings, recovery = self._savings(which, host_only)
            base = _Identity(savings[:, :, KEEP], recovery[:, :, KEEP], np.int64(0))
            self.identities[which] = base
            pattern = self._pattern(which, host_only)
            keep = _make_codes(np.zeros((1, self.problem.num_victims), np.int32))
            self.identities[which] = _Identity(base.savings, base.recovery, self._public(pattern, keep)[0])
        return self.identities[which]

    def _pattern(self, which: int, host_only: np.ndarray | None) -> _Pattern:
        if host_only is None:
            host_only = self._identity_host_only(which)
        key = (which, np.packbits(host_only).tobytes())
        if key not in self.patterns:
            base = self._identity(which)
            if key not in self.patterns:  # making the identity may have made it
                self.patterns[key] = self._make_pattern(base, *self._savings(which, host_only))
        return self.patterns[key]

    def _savings(self, which: int, host_only: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[U, M, K] twice: saving and recovery price; 0 where padded (O-5).

        A source touches few owners, so the candidates share one table per pattern.
        """
        s, outcome = self.static, self.outcome
        key = np.packbits(host_only).tobytes()
        if key not in self.savings:
            self.savings[key] = self._savings_of(None, host_only, np.arange(len(s.owners)))
        savings, recovery = self.savings[key]
        touched = outcome.released[which] | outcome.restored[which].any(-1)
        if touched.any():
            owners = np.flatnonzero(np.append(touched, False)[s.index].any(1))
            savings, recovery = savings.copy(), recovery.copy()
            savings[owners], recovery[owners] = self._savings_of(which, host_only, owners)
        return savings, recovery

    def _savings_of(
        self, which: int | None, host_only: np.ndarray, owners: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[len(owners), M, K] twice."""
        s, outcome, problem = self.static, self.outcome, self.problem
        index = s.index[owners]
        rows = np.unique(index[index < len(outcome.victim)])
        sizes = problem.state.capacity.item_bytes()
        pools = problem.state.capacity.num_pools
        alive, pages, on_device = outcome.alive[rows], outcome.host_pages[rows], outcome.image_device[rows]
        if which is not None:
            alive = alive & ~outcome.released[which][rows, None]
            pages = pages - outcome.restored[which][rows, None]
        if host_only.any():
            gone = np.append(host_only, False)
            shared = gone[outcome.classes[rows]][..., None] * outcome.class_pages[outcome.classes[rows]]
            pages = pages + shared.sum(1)[:, None].astype(pages.dtype)
        is_class = outcome.image_class[rows] < len(host_only)
        if is_class.any():
            at = np.minimum(outcome.image_class[rows], len(host_only) - 1)
            on_device = np.where(is_class[:, None], ~host_only[at][:, None], on_device)
        restore, fork = (~on_device).astype(np.int64), on_device.astype(np.int64)
        kv_bytes = (pages[..., :pools] * np.asarray(sizes[1:], np.int64)).sum(-1)
        t = self.model.transfer
        h2d = batch_ns_array(t.h2d, pages[..., pools] + restore, kv_bytes + restore * sizes[0])
        tail_ops, tail_bytes = s.tail_ops[rows, None], s.tail_bytes[rows, None]
        d2d = batch_ns_array(t.d2d, tail_ops + fork, tail_bytes + fork * sizes[0])
        direct = np.full((len(outcome.victim) + 1, alive.shape[1]), SATURATED)
        direct[rows] = np.where(alive, saturating_sum(h2d, d2d), SATURATED)
        mine = direct[index]  # int64[owners, M, K]
        best = mine
        if index.shape[1] > 1:
            best = mine.copy()
            for j in range(index.shape[1] - 1):  # from checkpoint j to every deeper one
                via = saturating_sum(mine[:, j, None, :], s.interval[owners, j, j + 1 :, None])
                np.minimum(best[:, j + 1 :], via, out=best[:, j + 1 :])
        rebuild = s.rebuild[index][..., None]
        recovery = np.minimum(best, rebuild)
        return rebuild - recovery, recovery

    def _make_pattern(self, base: _Identity, savings: np.ndarray, recovery: np.ndarray) -> _Pattern:
        s = self.static
        lost = np.maximum(base.savings[..., None] - savings, 0).max(1, initial=0)
        worse = recovery > base.recovery[..., None]
        hits = np.append(self.facts.hits, 0)[s.index][..., None]
        epochs = np.append(self.facts.last_hit, 0)[s.index][..., None]
        hopeless = (s.rebuild == SATURATED)[s.index].any(1)[:, None] & (worse.any(1) | (lost > 0))
        new = np.full((1, *savings.shape[1:]), s.new_saving, np.int64)
        masked = np.where(s.record_mask[..., None], np.concatenate([savings, new])[s.record_owner], 0)
        empirical = masked.max(1, initial=0)
        return _Pattern(
            saturating_product(lost, s.weights[:, None]),
            empirical,
            self._lone_change(empirical),
            savings[s.credited].max(1, initial=0),
            (worse & (hits > 0)).sum(1),
            np.where(worse & (hits > 0), epochs, 0).max(1, initial=0),
            hopeless,
        )

    def _lone_change(self, empirical: np.ndarray) -> np.ndarray:
        """Returns int64[V, K] from int64[L, K]: every other owner keeps."""
        s, v = self.static, self.problem.num_victims
        out = np.zeros((v + 1, empirical.shape[1]), np.int64)
        if len(s.record):
            kept = empirical[:, KEEP]
            group = np.searchsorted(s.record_starts, np.arange(len(kept)), side="right") - 1
            best = np.maximum.reduceat(kept, s.record_starts)
            at_best = kept == best[group]
            alone = np.add.reduceat(at_best.astype(np.int64), s.record_starts) == 1
            second = np.maximum.reduceat(np.where(at_best, 0, kept), s.record_starts)
            others = np.where(at_best & alone[group], second[group], best[group])
            after = np.maximum(others[:, None], empirical)
            change = (after - best[group][:, None]) * s.record_count[group][:, None]
            np.add.at(out, s.victim[s.record_owner], change)
        return out[:v]


@dataclass(frozen=True, eq=False)
class _Identity:
    """Values of one candidate's identity state."""

    savings: np.ndarray  # int64[U, M]
    recovery: np.ndarray  # int64[U, M]
    public: np.int64


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


def _make_static(
    problem: Problem, facts: CacheFacts, model: MachineCostModel, new: NewCheckpoint | None
) -> _Static:
    state, rows = problem.state, problem.checkpoints
    q, page = len(rows), state.capacity.page_tokens
    owner = state.checkpoint_owner[rows]
    order = np.lexsort(
        (state.checkpoint_ordinal[rows], state.checkpoint_kind[rows], state.checkpoint_frontier[rows], owner)
    )
    owners, first, counts = np.unique(owner[order], return_index=True, return_counts=True)
    depth = int(counts.max(initial=1))
    index = np.full((len(owners), depth), q, np.int32)
    rank = np.arange(q) - np.repeat(first, counts)
    index[np.repeat(np.arange(len(owners)), counts), rank] = order

    tokens = np.append(state.checkpoint_frontier[rows], 0).astype(np.int64)
    work = np.concatenate([state.checkpoint_rebuild[rows], np.zeros((1, 3), np.int32)]).astype(np.int64)
    rebuild = prefill_ns_array(model, work[:, 0], tokens, tokens * (tokens + 1) // 2, work[:, 1], work[:, 2])
    lower, upper = np.triu_indices(depth, 1)  # from checkpoint j up to i
    start, end = tokens[index][:, lower], tokens[index][:, upper]
    more = np.maximum(work[index][:, upper] - work[index][:, lower], 0)
    suffix = np.maximum(end - start, 0)
    price = prefill_ns_array(
        model,
        np.maximum(more[..., 0], suffix > 0),
        suffix,
        start * suffix + suffix * (suffix + 1) // 2,
        more[..., 1],
        more[..., 2],
    )
    interval = np.full((len(owners), depth, depth), SATURATED)
    is_below = (start < end) & (index[:, upper] < q)  # ranks are filled from below
    interval[:, lower, upper] = np.where(is_below, price, SATURATED)

    partial = state.checkpoint_kv_tokens[rows] % page > 0
    sizes = np.asarray(state.capacity.item_bytes()[1:], np.int64)
    victim_of = np.full(state.num_owners, problem.num_victims, np.int32)
    victim_of[problem.victims] = np.arange(problem.num_victims)

    wanted = np.zeros(facts.matches.shape[1], bool) if new is None else new.matches
    kinds, how_often = _equal_columns(np.vstack([facts.matches, wanted]))
    by_owner = np.vstack([kinds[:q], np.zeros(kinds.shape[1], bool)])[index]  # bool[U, M, G]
    by_owner = np.concatenate([by_owner, np.repeat(kinds[None, q:], depth, 1)])
    record, record_owner = np.nonzero(by_owner.any(1).T)
    groups, starts = np.unique(record, return_index=True)
    owner_of = np.searchsorted(owners, problem.victims)
    crowded = np.isin(record, groups[np.bincount(np.searchsorted(groups, record)) > 1])
    is_crowded = np.isin(owner_of, record_owner[crowded])
    return _Static(
        owners,
        index,
        rebuild,
        interval,
        partial.sum(1).astype(np.int64),
        (partial * sizes).sum(1),
        owner_of,
        is_crowded,
        np.append(victim_of[owners], problem.num_victims),
        facts.weights[owners],
        np.flatnonzero(facts.credited[owners]),
        record,
        record_owner,
        by_owner[record_owner, :, record],
        0 if new is None else new.saving_ns,
        new.saving_ns if new is not None and new.is_credited else 0,
        starts,
        how_often[groups].astype(np.int64),
    )


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


def _equal_rows(bits: np.ndarray) -> np.ndarray:
    """Returns int64[B], equal numbers for equal rows of bool[B, C]; a number is some row's index."""
    packed = np.packbits(bits, axis=1)
    width, size = packed.shape[1], packed.tobytes()
    first: dict[bytes, int] = {}
    return np.asarray(
        [first.setdefault(size[at : at + width], i) for i, at in enumerate(range(0, len(size), width))],
        np.int64,
    )


def _equal_columns(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct columns of bool[Q, W] and how often each occurs."""
    kind = _equal_rows(bits.T) if bits.shape[1] else np.zeros(0, np.int64)
    first, counts = np.unique(kind, return_counts=True)
    return bits[:, first], counts


def _gather(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns ``table[i, codes[b, i]]`` as [B, rows]."""
    return table.ravel()[codes + np.arange(len(table), dtype=np.int32) * table.shape[1]]
