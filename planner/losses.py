"""What every option of every owner loses under one candidate, and sums of that over many targets.

Owns: the option tables of one candidate, one row for each owner and set of its classes on Host only, and the
batch view that reads them: the reference target once, then the differences. Owns no recipe (`savings`) and
no rule of what counts (`portfolio`).

Letters: B targets, V victims, K options, U owners with checkpoints, L (record group, owner) pairs, G patterns
of the batch, n differences, r rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from ninfer_jax.planner.cells import Cells, make_cells, sum_by_target
from ninfer_jax.planner.class_patterns import class_patterns
from ninfer_jax.planner.cost import (
    EXACT_FLOAT,
    SATURATED,
    saturating_product,
    saturating_total,
)
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.projection import fates_of
from ninfer_jax.planner.round_facts import CacheFacts, RoundFacts
from ninfer_jax.planner.savings import SavingsBook
from ninfer_jax.planner.target import ABSENT, KEEP, TargetBatch


@dataclass(frozen=True, eq=False)
class LossRows:
    """Option tables; row 0 is the new checkpoint of a capture, which no option touches."""

    private: np.ndarray  # int64[r, K], weighted loss
    credit: np.ndarray  # int64[r, K], value of the owner's shared credit
    hits: np.ndarray  # int64[r, K], checkpoints with observed hits that got worse
    epoch: np.ndarray  # int64[r, K], newest of their hits
    broken: np.ndarray  # bool[r, K], something saturated and something got worse: the loss is the maximum
    empirical: np.ndarray  # int64[r, P, K], saving for each record group that names a checkpoint of the owner


@dataclass(eq=False)
class CandidateLosses:
    """The rows met so far under one candidate. `variants` alone adds to them."""

    which: int
    book: SavingsBook
    facts: CacheFacts
    table: LossRows
    identity: np.ndarray  # int64[U], the book's rows in the identity state
    identity_host_only: np.ndarray  # bool[C]
    row_of: dict[int, int] = field(default_factory=dict)  # book row -> row of `table`
    seen: dict[bytes, np.ndarray] = field(default_factory=dict)  # Host-only classes -> rows

    def variants(self, host_only: np.ndarray) -> np.ndarray:
        """Returns int64[G, U + 1], the row of every owner under each set of Host-only classes bool[G, C]."""
        packed = [bits.tobytes() for bits in np.packbits(host_only, axis=1)]
        for key, bits in zip(packed, host_only, strict=True):
            if key not in self.seen:
                rows = self.identity.copy()
                differs = bits != self.identity_host_only
                owners = np.flatnonzero(self.book.owner_classes[:, differs].any(1))
                if len(owners):
                    rows[owners] = self.book.rows(self.which, owners, bits)
                self.seen[key] = rows
        asked = np.stack([self.seen[key] for key in packed])
        known = np.asarray([*self.row_of, *asked.ravel().tolist()], np.int64)
        fresh = [r for r in dict.fromkeys(known.tolist()) if r not in self.row_of]
        if fresh:
            self._add(fresh, asked)
        translate = np.zeros(len(self.book.number), np.int64)
        translate[list(self.row_of)] = list(self.row_of.values())
        return np.append(translate[asked], np.zeros((len(asked), 1), np.int64), 1)

    def _add(self, fresh: list[int], asked: np.ndarray) -> None:
        owner_of = np.zeros(len(self.book.number), np.int64)
        owner_of[asked] = np.arange(asked.shape[1])
        new = _loss_rows(self.book, self.facts, owner_of[fresh], fresh, self.identity)
        at = len(self.table.private)
        self.row_of.update({r: at + i for i, r in enumerate(fresh)})
        self.table = LossRows(
            **{name: np.concatenate([old, getattr(new, name)]) for name, old in vars(self.table).items()}
        )


def make_candidate_losses(
    book: SavingsBook, facts: CacheFacts, which: int, host_only: np.ndarray
) -> CandidateLosses:
    """Returns the tables of one candidate, identity rows included.

    Args:
        host_only: bool[C], classes on Host only in its identity state.
    """
    s, k = book.facts, book.problem.num_options
    owners = np.arange(len(s.owners))
    identity = np.asarray(book.rows(which, owners, host_only), np.int64)
    width = int(np.diff(s.pair_bounds).max(initial=0))
    zero = np.zeros((1, k), np.int64)
    first = LossRows(zero, zero, zero, zero, zero > 0, np.full((1, width, k), s.new_saving, np.int64))
    return CandidateLosses(which, book, facts, first, identity, host_only)


def _loss_rows(
    book: SavingsBook, facts: CacheFacts, owners: np.ndarray, rows: Iterable[int], identity: np.ndarray
) -> LossRows:
    s = book.facts
    savings = np.stack([book.saving[r] for r in rows])
    recovery = np.stack([book.recovery[r] for r in rows])
    before = [int(r) for r in identity[owners]]
    kept = np.stack([book.saving[r][:, KEEP] for r in before])[..., None]
    cost = np.stack([book.recovery[r][:, KEEP] for r in before])[..., None]
    lost = np.maximum(kept - savings, 0).max(1, initial=0)
    worse = recovery > cost
    index = s.index[owners]
    was_hit = worse & (np.append(facts.hits, 0)[index][..., None] > 0)
    epochs = np.append(facts.last_hit, 0)[index][..., None]
    hopeless = (s.rebuild == SATURATED)[index].any(1)[:, None] & (worse.any(1) | (lost > 0))
    is_credited = np.isin(owners, s.credited)
    counts = np.diff(s.pair_bounds)
    empirical = np.zeros((len(owners), int(counts.max(initial=0)), savings.shape[2]), np.int64)
    for slot in range(empirical.shape[1]):
        has = np.flatnonzero(counts[owners] > slot)
        pair = s.pairs[s.pair_bounds[owners[has]] + slot]
        empirical[has, slot] = np.where(s.record_mask[pair][..., None], savings[has], 0).max(1, initial=0)
    return LossRows(
        saturating_product(lost, s.weights[owners, None]),
        np.where(is_credited[:, None], savings.max(1, initial=0), 0),
        was_hit.sum(1),
        np.where(was_hit, epochs, 0).max(1, initial=0),
        hopeless,
        empirical,
    )


@dataclass(frozen=True, eq=False)
class LossBatch:
    """One batch of one candidate, ready to be summed. Build with `make_loss_batch`.

    Attributes:
        cells: differences; the source's ABSENT reads as KEEP.
        group: pattern of each target.
        variant: row of each owner under each pattern.
        at: row of each difference's owner.
    """

    facts: RoundFacts
    table: LossRows
    codes: np.ndarray  # int32[B, V]
    cells: Cells
    group: np.ndarray  # int64[B]
    variant: np.ndarray  # int64[G, U + 1]
    at: np.ndarray  # int64[n]

    def owner_codes(self, codes: np.ndarray) -> np.ndarray:
        """Returns int32[..., U + 1] from int32[..., V]; owners outside of the domain keep."""
        keep = np.zeros((*codes.shape[:-1], 1), codes.dtype)
        return np.concatenate([codes, keep], -1)[..., self.facts.victim]

    def total(self, table: np.ndarray) -> np.ndarray:
        """Returns int64[B], sums of ``table[row, code]`` (int64[r, K], not negative) over owners."""
        cells = self.cells
        if float(table.max(initial=0)) * (len(cells.rows) + len(self.facts.owners) + 1) >= EXACT_FLOAT:
            return saturating_total(self.gather(table), -1)
        middle = table[self.variant, self.owner_codes(cells.reference)].sum(1)[self.group]
        if not len(cells.rows):
            return middle
        change = table[self.at, cells.codes] - table[self.at, cells.reference[cells.owners]]
        return middle + sum_by_target(cells, change)

    def gather(self, table: np.ndarray) -> np.ndarray:
        """Returns ``table[row, code]`` as [B, U + 1]."""
        return table[self.variant[self.group], self.owner_codes(self.codes)]

    def empirical(self) -> np.ndarray:
        """Returns int64[B], the sum over records of the best saving that one of their checkpoints has (O-6).

        Changes of owners that share no record add up; only targets in which two of the others changed are
        computed in full.
        """
        s, cells, table = self.facts, self.cells, self.table.empirical
        owner, count = s.record_owner, s.record_count
        kept = table[self.variant[:, owner], s.slot, self.owner_codes(cells.reference)[owner]]  # [G, L]
        best = np.maximum.reduceat(kept, s.record_starts, axis=1)
        middle = saturating_total(saturating_product(best, count), -1)
        largest = float(table.max(initial=0)) * float(count.sum())
        if largest * (len(cells.rows) + 1) >= EXACT_FLOAT:
            return self._in_full(np.arange(len(self.codes)))
        total = middle[self.group]
        who = s.owner_of[cells.owners]
        size = (s.pair_bounds[1:] - s.pair_bounds[:-1])[who]
        having = np.flatnonzero(size)
        if not len(having):
            return total
        group_of = np.searchsorted(s.record_starts, np.arange(len(owner)), side="right") - 1
        at_best = kept == best[:, group_of]
        alone = np.add.reduceat(at_best.astype(np.int64), s.record_starts, axis=1) == 1
        second = np.maximum.reduceat(np.where(at_best, 0, kept), s.record_starts, axis=1)
        others = np.where(at_best & alone[:, group_of], second[:, group_of], best[:, group_of])
        # every difference meets every pair of its owner
        size, who = size[having], who[having]
        cell = np.repeat(having, size)
        begins = np.cumsum(size) - size
        pair = s.pairs[np.arange(len(cell)) - np.repeat(begins - s.pair_bounds[who], size)]
        pattern = self.group[cells.rows[cell]]
        after = np.maximum(others[pattern, pair], table[self.at[cell], s.slot[pair], cells.codes[cell]])
        gained = (after - best[pattern, group_of[pair]]) * count[group_of[pair]]
        change = np.zeros(len(cells.rows), np.int64)
        change[having] = np.add.reduceat(gained, begins)
        total = total + sum_by_target(cells, change)
        crowded = np.bincount(cells.rows[s.is_crowded[cells.owners]], minlength=len(total)) > 1
        rows = np.flatnonzero(crowded)
        if len(rows):
            total[rows] = self._in_full(rows)
        return total

    def _in_full(self, rows: np.ndarray) -> np.ndarray:
        s, owner = self.facts, self.facts.record_owner
        codes = self.owner_codes(self.codes[rows])[:, owner]
        each = self.table.empirical[self.variant[self.group[rows]][:, owner], s.slot, codes]
        best = np.maximum.reduceat(each, s.record_starts, axis=1)
        return saturating_total(saturating_product(best, s.record_count), -1)


def make_loss_batch(problem: Problem, losses: CandidateLosses, targets: TargetBatch) -> LossBatch:
    """Returns the view of a batch whose targets all have the candidate of `losses`."""
    cells = make_cells(targets.codes)
    patterns = class_patterns(problem.class_tables, targets.candidate, targets.codes, cells)
    fates = fates_of(np, problem.tables, patterns.candidate, patterns.on_device, patterns.on_host)
    variant = losses.variants(fates[1] & ~fates[0])
    present = Cells(
        cells.num_targets,
        np.where(cells.reference == ABSENT, KEEP, cells.reference),
        cells.rows,
        cells.owners,
        np.where(cells.codes == ABSENT, KEEP, cells.codes),
        cells.starts,
    )
    codes = np.where(targets.codes == ABSENT, KEEP, targets.codes)
    at = variant[patterns.group[cells.rows], losses.book.facts.owner_of[cells.owners]]
    return LossBatch(losses.book.facts, losses.table, codes, present, patterns.group, variant, at)
