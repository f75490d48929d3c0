"""One search in progress: the incumbent, what was assessed, and every budget (G-9..G-12).

Owns: the only mutable state of a search. A target becomes incumbent here and nowhere else: feasible on every
axis and stage, adoptable, placeable in the arena, cheaper or preferred by O-12. Chooses nothing to look at.

Letters: B targets, V victims, K options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from ninfer_jax.planner.allowance import Allowance, Forecast, StopReason, allow
from ninfer_jax.planner.cost import SATURATED
from ninfer_jax.planner.search_model import Picture
from ninfer_jax.planner.search_types import Assessment, Budget, Clock
from ninfer_jax.planner.search_values import (
    Found,
    PressureDomain,
    Rejected,
    Rejection,
    SearchFunctions,
    SearchPhase,
    SearchResult,
    SearchRound,
    found_at,
    rows_of,
)
from ninfer_jax.planner.target import TargetBatch, take

BLOCK: Final = 1024
MAX_ELITE_CELLS: Final = 256
MAX_PLACEMENTS: Final = 64  # arena questions per assessed batch
GUESSED_NS_PER_CELL: Final = 40  # until the first operation was measured


class SearchStopped(Exception):
    """Leaves the optional part of a search; `search` turns it into a stop reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(eq=False)
class CandidateNotes:
    """What a search knows of one candidate so far.

    Attributes:
        moves, moves_assessment, moves_prices: the successors of its identity.
        picture: the additive picture around its identity.
        attainable: lowest price that is still predicted and not yet tried.
        num_seen: distinct targets assessed inside the budgets.
        best_key, best: its best target: feasible ones first, then what misses least, then the cheapest.
        elite: the cheapest feasible target for every (owner, option), in problems of few cells.
        refined: targets around which all single changes were assessed.
    """

    index: int
    identity: Found
    attainable: int
    best_key: tuple[int, int, int]
    best: Rejected
    picture: Picture | None = None
    moves: TargetBatch | None = None
    moves_assessment: Assessment | None = None
    moves_prices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_seen: int = 0
    elite: dict[tuple[int, int], Found] = field(default_factory=dict)
    refined: set[bytes] = field(default_factory=set)

    @property
    def can_run(self) -> bool:
        """Whether a feasible and adoptable target of this candidate is known."""
        return self.best_key[0] == 0

    def is_new(self, target: TargetBatch) -> bool:
        """Returns whether nothing was refined around a target of this candidate yet."""
        return target.codes.tobytes() not in self.refined


class Session:
    """State of one search; dropped with it."""

    def __init__(self, round_: SearchRound, functions: SearchFunctions, budget: Budget, clock: Clock) -> None:
        self.round, self.functions, self.budget, self.clock = round_, functions, budget, clock
        self.start_ns = clock()
        self.num_victims = round_.identities.codes.shape[1]
        self.best: Found | None = None
        self.best_tie: tuple[int, ...] | None = None
        self.notes: dict[int, CandidateNotes] = {}
        self.seen: set[int] = set()
        self.num_targets = self.num_cells = self.num_improvements = 0
        self.allowance = Allowance(0, 0, 1)
        self.placements_left = MAX_PLACEMENTS
        self.assessed_at_renewal = 0
        self.ns_per_cell = float(GUESSED_NS_PER_CELL)
        self.charged_ns = self.charged_cells = 0
        self.licensed = np.ones(self.num_victims, bool)
        self.phase = SearchPhase.NONE
        mixed = np.arange(1, self.num_victims + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.weights = ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)).view(np.int64)

    @cached_property
    def domain(self) -> PressureDomain:
        """The pressure domain of the round, made when somebody is first put under pressure."""
        return self.round.domain()

    @property
    def price_ns(self) -> int:
        """J of the incumbent; SATURATED without one."""
        return SATURATED if self.best is None else self.best.price_ns

    @property
    def targets_left(self) -> int:
        """Distinct targets that may still be assessed."""
        return self.budget.max_targets - self.num_targets

    def assess_mandatory(self, targets: TargetBatch) -> np.ndarray:
        """Returns bool[B], feasible and adoptable, of targets that no budget may cancel (G-11)."""
        assessment = self.functions.assess(targets)
        prices = self.functions.value(targets, assessment)
        can = self.offer(targets, assessment, prices)
        self._note(targets, assessment, prices, can)
        return can

    def best_of(self, targets: TargetBatch) -> Found | None:
        """Returns the best of these targets alone; the incumbent and the notes stay as they are."""
        before, self.best, self.best_tie = (self.best, self.best_tie), None, None
        assessment = self.functions.assess(targets)
        self.offer(targets, assessment, self.functions.value(targets, assessment))
        found = self.best
        self.best, self.best_tie = before
        return found

    def evaluate(
        self,
        targets: TargetBatch,
        completion_targets: int,
        *,
        is_known: bool = True,
        prices_all: bool = True,
    ) -> tuple[Assessment, np.ndarray]:
        """Returns assessment and prices of optional targets, after asking every budget.

        Targets beyond a count budget are cut off; the search stops after those that still fit. Without
        `prices_all` a target that does not fit has no price (SATURATED).
        """
        keys = self.keys(targets)
        fresh = [k not in self.seen for k in keys]
        cells = len(keys) * max(self.num_victims, 1)
        self.ask_time(cells, completion_targets * max(self.num_victims, 1), is_known=is_known)
        reason, room = self._room(len(keys))
        if reason is not None:
            counted = np.cumsum(fresh)
            rows = np.flatnonzero(counted <= room)
            targets, keys = take(targets, rows), [keys[i] for i in rows]
            fresh = [fresh[i] for i in rows]
            if sum(fresh) < room and len(rows) == len(counted):
                reason = None  # everything fitted after all
        before = self.clock()
        assessment = self.functions.assess(targets)
        if prices_all:
            prices = self.functions.value(targets, assessment)
        else:
            prices = np.full(len(targets), SATURATED, np.int64)
            rows = np.flatnonzero(assessment.fits)
            prices[rows] = self.functions.value(take(targets, rows), rows_of(assessment, rows))
        self.seen.update(keys)
        self.num_targets += sum(fresh)
        for d in np.unique(targets.candidate):
            self.notes[int(d)].num_seen += int((np.asarray(fresh) & (targets.candidate == d)).sum())
        self.num_cells += len(keys) * self.num_victims
        can = self.offer(targets, assessment, prices)
        self._note(targets, assessment, prices, can)
        self._keep_elite(targets, assessment, prices, can)
        self.charged_ns += self.clock() - before
        self.charged_cells += max(len(keys), 1) * max(self.num_victims, 1)
        self.ns_per_cell = self.charged_ns / self.charged_cells
        if reason is not None:
            raise SearchStopped(reason)
        return assessment, prices

    def ask_time(self, cells: int, completion_cells: int, *, is_known: bool = True) -> None:
        """Raises SearchStopped unless an operation as long as assessing `cells` may run (G-10)."""
        used = self.clock() - self.start_ns
        attainable = min((n.attainable for n in self.notes.values()), default=self.price_ns)
        forecast = Forecast(
            int(cells * self.ns_per_cell),
            int(max(cells, completion_cells) * self.ns_per_cell),
            SATURATED if self.price_ns >= SATURATED else self.price_ns - attainable,
            is_known,
        )
        got = allow(
            self.allowance, used, forecast, has_progressed=self.num_targets > self.assessed_at_renewal
        )
        if isinstance(got, StopReason):
            raise SearchStopped(got)
        if got is not self.allowance:
            self.assessed_at_renewal = self.num_targets
        self.allowance = got

    def attempt(self, targets: TargetBatch, completion_targets: int = 0) -> None:
        """Assesses what was not seen yet, in blocks."""
        first = {key: i for i, key in reversed(list(enumerate(self.keys(targets)))) if key not in self.seen}
        rows = np.sort(np.fromiter(first.values(), np.int64, len(first)))
        for at in range(0, len(rows), BLOCK):
            left = max(completion_targets, len(rows) - at)
            self.evaluate(take(targets, rows[at : at + BLOCK]), left, prices_all=False)

    def offer(self, targets: TargetBatch, assessment: Assessment, prices: np.ndarray) -> np.ndarray:
        """Returns bool[B], feasible and adoptable by numbers, after the best of them became incumbent.

        The arena is asked only for targets that would become the incumbent (design 3.3).
        """
        can = assessment.fits.copy()
        rows = np.flatnonzero(can)
        if len(rows):
            can[rows] = self.functions.adoptable(take(targets, rows))
        rows = np.flatnonzero(can & (prices <= self.price_ns))
        rows = rows[np.argsort(prices[rows], kind="stable")]
        at, done = 0, False
        self.placements_left = MAX_PLACEMENTS
        while at < len(rows) and not done:
            price = prices[rows[at]]
            end = at + int(np.searchsorted(prices[rows[at:]], price, side="right"))
            done = self._offer_equal(targets, assessment, int(price), rows[at:end])
            at = end
        return can

    def keys(self, targets: TargetBatch) -> list[int]:
        """Returns a 64-bit digest per target; equal targets have equal ones."""
        with np.errstate(over="ignore"):
            mixed = (targets.codes + 1) * self.weights[: self.num_victims]
            mixed = mixed.sum(1) + (targets.candidate + 1) * self.weights[self.num_victims]
        return mixed.tolist()

    def result(self, stop: StopReason, first: Found | None, *, is_fallback: bool) -> SearchResult:
        """Returns the outcome as a value."""
        rejected = []
        for d, notes in sorted(self.notes.items()):
            if self.best is not None and d == int(self.best.target.candidate[0]):
                continue
            loser = notes.best
            if loser.reason == Rejection.PRICE and loser.found.price_ns < self.price_ns:
                loser = Rejected(loser.found, Rejection.ARENA)
            rejected.append(loser)
        rejected.sort(key=lambda x: x.found.price_ns)
        return SearchResult(
            self.best,
            stop,
            self.phase,
            is_fallback,
            first,
            tuple(rejected),
            self.num_targets,
            self.num_cells,
            self.num_improvements,
            self.allowance.granted_ns,
            self.allowance.renewals,
            self.clock() - self.start_ns,
            self.licensed,
        )

    def _room(self, wanted: int) -> tuple[StopReason | None, int]:
        """Returns which count budget `wanted` more targets could break, and how many are left."""
        b, v = self.budget, max(self.num_victims, 1)
        left = [
            (b.max_targets - self.num_targets, StopReason.TARGET_BUDGET),
            (b.arena_targets - len(self.seen), StopReason.EXPANSION_CAPACITY),
            ((b.max_work - self.num_cells) // v, StopReason.WORK_BUDGET),
        ]
        room, reason = min(left, key=lambda x: x[0])
        return (reason, max(room, 0)) if wanted > room else (None, room)

    def _offer_equal(
        self, targets: TargetBatch, assessment: Assessment, price: int, rows: np.ndarray
    ) -> bool:
        """Returns whether the search among dearer rows can end, after trying rows of one price (O-12)."""
        ties: list[tuple[int, ...]] | None = None
        equals_best = self.best is not None and price == self.best.price_ns
        if len(rows) > 1 or equals_best:
            ties = self._ties(take(targets, rows), rows_of(assessment, rows))
            order = sorted(range(len(rows)), key=ties.__getitem__)
            rows, ties = rows[order], [ties[i] for i in order]
            if equals_best:
                assert self.best is not None
                if self.best_tie is None:
                    self.best_tie = self._ties(self.best.target, self.best.assessment)[0]
        for i, row in enumerate(rows):
            if equals_best and ties is not None and self.best_tie is not None and ties[i] >= self.best_tie:
                return True
            found = found_at(targets, assessment, price, int(row))
            if self._is_placed(found):
                self.num_improvements += self.best is not None
                self.best, self.best_tie = found, None if ties is None else ties[i]
                return True
        return self.placements_left <= 0

    def _is_placed(self, found: Found) -> bool:
        """Returns whether the arena can execute the target; without Host KV copies nothing is asked."""
        if not found.assessment.d2h[0, 1:].any():
            return True
        self.placements_left -= 1
        return self.placements_left >= 0 and self.functions.confirm(found.target).ok

    def _ties(self, targets: TargetBatch, assessment: Assessment) -> list[tuple[int, ...]]:
        keys = np.concatenate([self.functions.tie_break(targets, assessment), targets.codes], 1)
        return [tuple(row) for row in keys.tolist()]

    def _note(
        self, targets: TargetBatch, assessment: Assessment, prices: np.ndarray, can: np.ndarray
    ) -> None:
        """Keeps the most interesting target of every candidate."""
        if not len(targets):
            return
        missing = assessment.residual.sum(1)
        order = np.lexsort((prices, missing, ~can, targets.candidate))
        which = targets.candidate[order]
        firsts = order[np.flatnonzero(np.diff(which, prepend=-1))]
        for d, row in zip(targets.candidate[firsts].tolist(), firsts.tolist(), strict=True):
            key = (int(not can[row]), int(missing[row]), int(prices[row]))
            if d in self.notes and key >= self.notes[d].best_key:
                continue
            reason = Rejection.PRICE
            if not can[row]:
                fits = bool(assessment.fits[row])
                reason = Rejection.NOT_ADOPTABLE if fits else Rejection.DOES_NOT_FIT
            rejected = Rejected(found_at(targets, assessment, int(prices[row]), row), reason)
            if d not in self.notes:
                self.notes[d] = CandidateNotes(d, rejected.found, int(prices[row]), key, rejected)
            self.notes[d].best_key, self.notes[d].best = key, rejected

    def _keep_elite(
        self, targets: TargetBatch, assessment: Assessment, prices: np.ndarray, can: np.ndarray
    ) -> None:
        """Remembers the cheapest feasible target for every (owner, option), in problems of few cells."""
        if self.num_victims * self.round.num_options > MAX_ELITE_CELLS:
            return
        rows = np.flatnonzero(can)
        for row in rows[np.argsort(prices[rows], kind="stable")].tolist():
            elite = self.notes[int(targets.candidate[row])].elite
            price = int(prices[row])
            better = [
                cell
                for cell in enumerate(targets.codes[row].tolist())
                if cell not in elite or price < elite[cell].price_ns
            ]
            if better:
                elite.update(dict.fromkeys(better, found_at(targets, assessment, price, row)))
