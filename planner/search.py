"""Materialisation search: which source, and what becomes of every inactive owner (G-1..G-14).

Owns: the order in which targets are looked at, the incumbent, the budgets, the reasons to stop. Everything it
knows about memory and prices comes through the functions it is given; it imports neither projection nor
portfolio and builds no action of its own.

    1. every identity is assessed (G-2); nothing to gain -> the best adoptable one
    2. no adoptable identity -> recency ladder (G-7) or root maximal (G-4), outside of every budget
    3. optional, inside the budgets: per candidate a picture of single changes, combinations read from it
       (cheapest first, then repaired and refined around the incumbent), all assessed exactly

Deterministic: the same answers and the same clock readings give the same result.

Letters: D candidates, B targets, V victims, R axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import jax
import numpy as np
from ninfer_jax.planner.allowance import Allowance, Forecast, StopReason, allow, first_allowance
from ninfer_jax.planner.cost import SATURATED
from ninfer_jax.planner.search_model import (
    Picture,
    attainable_price,
    best_multiplier,
    core,
    forced,
    make_picture,
    num_combinations,
    sweep,
)
from ninfer_jax.planner.search_types import (
    Adoptable,
    Assess,
    Assessment,
    Budget,
    Clock,
    Confirm,
    Successors,
    TieBreak,
    Value,
)
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch, concatenate, make_targets, take

CORE_COMBINATIONS: Final = 2048
DEEP_COMBINATIONS: Final = 65_536
CORE_TARGETS: Final = 256
MAX_ROUNDS: Final = 6
BLOCK: Final = 1024
MAX_ELITE_CELLS: Final = 256
MAX_FORCED: Final = 12
GUESSED_NS_PER_CELL: Final = 40


class SearchPhase(Enum):
    """Where a search stopped."""

    NONE = "before any optional work"
    CONSTRUCTION = "building combinations for the candidates"
    REFINEMENT = "changing single owners of the incumbent"
    EXPANSION = "enumerating further combinations"


class Rejection(Enum):
    """Why a candidate was not chosen."""

    PRICE = "costs more"
    DOES_NOT_FIT = "no target of it was found that fits"
    NOT_ADOPTABLE = "fits, but cannot be published"
    ARENA = "fits by numbers, but the Host arena has no hole for its copies"


@dataclass(frozen=True, eq=False)
class SearchRound:
    """What a search is told about one round.

    Attributes:
        identities: one target per candidate, root first.
        maximal: one target per candidate that releases all it may.
        capacity: int32[R], to read the assessments' occupancy.
        improvable: bool[D], candidates whose identity fits but could get cheaper by pressure (G-2).
        recency: int64[V], newest hit or publication of each victim, -1 for none; None switches G-7 off.
        preserve_code: option that demotes a whole owner to Host; used by the recency ladder only.
        num_options: option codes are below this.
    """

    identities: TargetBatch
    maximal: TargetBatch
    capacity: np.ndarray
    improvable: np.ndarray
    recency: np.ndarray | None = None
    preserve_code: int = KEEP
    num_options: int = 3


@dataclass(frozen=True, eq=False)
class SearchFunctions:
    """The injected half (design 3.4)."""

    assess: Assess
    confirm: Confirm
    successors: Successors
    value: Value
    tie_break: TieBreak
    adoptable: Adoptable


@dataclass(frozen=True, eq=False)
class Found:
    """One assessed target; arrays have one row."""

    target: TargetBatch
    assessment: Assessment
    price_ns: int


@dataclass(frozen=True, eq=False)
class Rejected:
    """The best target of a candidate that lost, and why."""

    found: Found
    reason: Rejection


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Outcome of one search.

    Attributes:
        best: the target to seal, or None if not even root maximal is adoptable.
        is_fallback: `best` is the correctness incumbent of G-4, which releases everything.
        first: the incumbent before optional work.
        rejected: one entry per other candidate, cheapest first.
        num_targets: distinct targets assessed inside the budgets.
        num_cells: (target, owner) cells projected inside the budgets.
        num_improvements: how often the incumbent got better.
        licensed: bool[V], owners that could be evicted whole.
    """

    best: Found | None
    stop: StopReason
    phase: SearchPhase
    is_fallback: bool
    first: Found | None
    rejected: tuple[Rejected, ...]
    num_targets: int
    num_cells: int
    num_improvements: int
    granted_ns: int
    renewals: int
    used_ns: int
    licensed: np.ndarray


def search_materialization(
    round_: SearchRound, functions: SearchFunctions, budget: Budget, clock: Clock
) -> SearchResult:
    """Returns the best target found, with the reason to stop; `shared_capture` is the other entry (G-6).

    Args:
        budget: optional effort; identities, the ladder and the maximal targets are not charged to it.
        clock: read once at the start and once before each optional operation.
    """
    return _Search(round_, functions, budget, clock).run()


class _Stop(Exception):
    """Leaves the optional part; never escapes this module."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(eq=False)
class _Candidate:
    """What is known of one candidate."""

    index: int
    identity: TargetBatch
    assessment: Assessment
    price: int
    picture: Picture | None = None
    moves: TargetBatch | None = None
    moves_assessment: Assessment | None = None
    moves_prices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_seen: int = 0
    elite: dict[tuple[int, int], Found] = field(default_factory=dict)
    refined: set[bytes] = field(default_factory=set)
    attainable: int = 0  # lowest price that is still predicted and not yet tried

    def is_new(self, target: TargetBatch) -> bool:
        """Returns whether nothing was refined around a target of this candidate yet."""
        return target.codes.tobytes() not in self.refined


class _Search:
    """State of one search; the one mutable thing here."""

    def __init__(self, round_: SearchRound, functions: SearchFunctions, budget: Budget, clock: Clock) -> None:
        self.round, self.f, self.budget, self.clock = round_, functions, budget, clock
        self.start_ns = clock()
        self.num_victims = round_.identities.codes.shape[1]
        self.best: Found | None = None
        self.best_tie: tuple[int, ...] | None = None
        self.losers: dict[int, tuple[tuple[int, ...], Rejected]] = {}
        self.seen: set[int] = set()
        self.num_targets = self.num_cells = self.num_improvements = 0
        self.allowance = Allowance(0, 0, 1)
        self.assessed_at_renewal = 0
        self.ns_per_cell = float(GUESSED_NS_PER_CELL)
        self.charged_ns = self.charged_cells = 0
        self.is_fallback = False
        self.licensed = np.ones(self.num_victims, bool)
        self.candidates: list[_Candidate] = []
        self.phase = SearchPhase.NONE
        rng = np.arange(1, self.num_victims + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.weights = ((rng ^ (rng >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)).view(np.int64)

    # ------------------------------------------------------------ mandatory part

    def run(self) -> SearchResult:
        """Returns the result."""
        r = self.round
        assessment = self.f.assess(r.identities)
        prices = self.f.value(r.identities, assessment)
        can = self._offer(r.identities, assessment, prices)
        self.candidates = [
            _Candidate(
                d,
                take(r.identities, np.array([d])),
                _rows(assessment, np.array([d])),
                int(prices[d]),
                attainable=int(prices[d]),
            )
            for d in range(len(prices))
        ]
        expandable = [d for d in range(len(prices)) if not can[d] or bool(r.improvable[d])]
        if self.best is not None and not expandable:
            return self._result(StopReason.NO_PRESSURE)
        if self.best is None:
            self._correctness_incumbent()
            if self.best is None:
                return self._result(StopReason.QUEUE_EXHAUSTED)
        elif r.recency is not None:
            self.licensed = np.zeros(self.num_victims, bool)
        first = self.best
        got = first_allowance(
            self.budget.deadline_ns,
            self.budget.first_window_ns,
            first.price_ns,
            blocked_requests=self.budget.blocked_requests,
        )
        if isinstance(got, StopReason):
            return self._result(got, first)
        self.allowance = got
        try:
            for _ in self._optional(expandable):
                pass
        except _Stop as stop:
            return self._result(stop.reason, first)
        return self._result(StopReason.QUEUE_EXHAUSTED, first)

    def _correctness_incumbent(self) -> None:
        """Finds a target that is feasible and adoptable if there is one, outside of every budget."""
        maximal = self.round.maximal
        assessment = self.f.assess(maximal)
        prices = self.f.value(maximal, assessment)
        if self.round.recency is not None:
            self._ladder()
            if self.best is not None:
                return
        root = np.array([0])
        if self._offer(take(maximal, root), _rows(assessment, root), prices[root])[0]:
            self.is_fallback = True
            return
        # a source that protected owners keep resident may need less than root does
        self._offer(maximal, assessment, prices)
        self.is_fallback = self.best is not None

    def _ladder(self) -> None:
        """Takes the rung with the least sacrifice that is feasible and adoptable, then spares what it can."""
        recency = self.round.recency
        assert recency is not None
        oldest_first = np.argsort(recency, kind="stable")
        unranked = int(np.count_nonzero(recency < 0))
        low, high = unranked, self.num_victims
        chosen: Found | None = None
        while low < high:
            middle = (low + high) // 2
            found = self._rung(oldest_first, middle)
            if found is None:
                low = middle + 1
            else:
                chosen, high = found, middle
        if chosen is None:
            chosen = self._rung(oldest_first, high)
        self.licensed = np.zeros(self.num_victims, bool)
        if chosen is None:
            self.licensed[:] = True
            return
        self.best = chosen
        for victim in oldest_first[:high][::-1]:
            self._spare(int(victim))
        assert self.best is not None
        self.licensed = self.best.target.codes[0] == EVICT

    def _rung(self, oldest_first: np.ndarray, sacrificed: int) -> Found | None:
        """Returns the cheapest target that evicts exactly the oldest and keeps or demotes the others."""
        kept = oldest_first[sacrificed:]
        demoted = np.tri(len(kept) + 1, len(kept), -1, dtype=bool)  # row i demotes the i oldest kept ones
        codes = np.full((len(demoted), self.num_victims), KEEP, np.int32)
        codes[:, oldest_first[:sacrificed]] = EVICT
        codes[:, kept] = np.where(demoted, self.round.preserve_code, KEEP)
        batches = []
        for d in range(len(self.round.identities)):
            source = self.round.identities.codes[d] != KEEP
            batch = np.where(source, self.round.identities.codes[d], codes)
            batches.append(make_targets(d, batch))
        targets = concatenate(batches)
        before, before_tie, self.best = self.best, self.best_tie, None
        assessment = self.f.assess(targets)
        self._offer(targets, assessment, self.f.value(targets, assessment), remember=False)
        found, self.best, self.best_tie = self.best, before, before_tie
        return found

    def _spare(self, victim: int) -> None:
        """Keeps one sacrificed owner after all if the incumbent stays feasible and adoptable."""
        assert self.best is not None
        codes = self.best.target.codes[0]
        if codes[victim] != EVICT:
            return
        options = {KEEP, self.round.preserve_code}
        trial = np.repeat(codes[None], len(options), 0)
        trial[:, victim] = sorted(options)
        targets = make_targets(int(self.best.target.candidate[0]), trial)
        before, self.best, self.best_tie = self.best, None, None
        assessment = self.f.assess(targets)
        self._offer(targets, assessment, self.f.value(targets, assessment), remember=False)
        self.best = self.best or before

    # ------------------------------------------------------------ optional part

    def _optional(self, expandable: list[int]) -> Iterator[None]:
        """Yields after every operation."""
        if not self.num_victims:
            return
        order = [self.candidates[d] for d in sorted(expandable, key=lambda d: (self.candidates[d].price, d))]
        self.phase = SearchPhase.CONSTRUCTION
        for n, candidate in enumerate(order):
            yield from self._construct(candidate, len(order) - n)
        self.phase = SearchPhase.REFINEMENT
        yield from self._refine(order)
        yield from self._transfer(order)
        yield from self._refine(order)
        self.phase = SearchPhase.EXPANSION
        yield from self._exchange(order)
        yield from self._refine(order)
        yield from self._diversify(order)
        for candidate in order:
            yield from self._deepen(candidate)
        yield from self._refine(order)
        yield from self._exchange(order)

    def _construct(self, candidate: _Candidate, num_left: int) -> Iterator[None]:
        """Builds pictures of the candidate from both ends and tries what they suggest.

        From identity, degradations add up: value first, then as much as feasibility needs. From the strongest
        target, which has released every shared object, what can be taken back adds up.
        """
        guess = num_left * (2 * self.num_victims * self.round.num_options + CORE_TARGETS)
        moves = self.f.successors(
            candidate.identity, residual=candidate.assessment.residual[0], licensed=self.licensed
        )
        assessment, prices = self._evaluate(moves, guess, is_known=False)
        candidate.moves, candidate.moves_assessment, candidate.moves_prices = moves, assessment, prices
        centre = Found(candidate.identity, candidate.assessment, candidate.price)
        candidate.picture = self._picture(centre, moves, assessment, prices)
        candidate.attainable = SATURATED  # from here on the picture says what can still be had
        yield
        for around in self._starts(candidate):
            yield from self._read(around, CORE_COMBINATIONS, CORE_TARGETS, guess)
        strongest = self._strongest(candidate)
        around = concatenate([strongest, self._around(strongest, candidate)])
        assessment, prices = self._evaluate(around, guess)
        yield
        if bool(assessment.fits[0]):
            centre = Found(strongest, _rows(assessment, np.array([0])), int(prices[0]))
            picture = self._picture(centre, around, assessment, prices)
            yield from self._read(picture, CORE_COMBINATIONS, CORE_TARGETS, guess)

    def _picture(
        self, centre: Found, moves: TargetBatch, assessment: Assessment, prices: np.ndarray
    ) -> Picture:
        return make_picture(
            centre.target,
            centre.assessment,
            centre.price_ns,
            moves,
            assessment,
            prices,
            self.round.capacity,
            self.round.num_options,
        )

    def _strongest(self, candidate: _Candidate) -> TargetBatch:
        """Returns the target in which every owner goes, or is demoted where the licence forbids that."""
        assert candidate.picture is not None
        is_open, codes = candidate.picture.is_open, candidate.identity.codes[0]
        preserved = np.where(is_open[:, self.round.preserve_code], self.round.preserve_code, codes)
        return make_targets(candidate.index, np.where(is_open[:, EVICT], EVICT, preserved))

    def _starts(self, candidate: _Candidate) -> list[Picture]:
        """Returns the pictures to read: around identity, and around moves that no single owner can make.

        Those are joint releases of shared objects, and evictions that make room for the publication.
        """
        picture, moves, assessment = candidate.picture, candidate.moves, candidate.moves_assessment
        assert picture is not None and moves is not None and assessment is not None
        starts = []
        differs = moves.codes != picture.codes
        wanted = differs.sum(1) > 1
        if bool(self.f.adoptable(candidate.identity)[0]):
            starts.append(picture)
        else:
            wanted |= self.f.adoptable(moves)
        rows = np.flatnonzero(wanted & (candidate.moves_prices < self._price()))
        rows = rows[np.argsort(candidate.moves_prices[rows], kind="stable")[:MAX_FORCED]]
        s, r = picture.columns
        for row in rows:
            change = (assessment.used[row] - candidate.assessment.used[0])[s, r].astype(np.float64)
            starts.append(forced(picture, moves.codes[row], change, int(candidate.moves_prices[row])))
        return starts

    def _read(
        self, picture: Picture, combinations: int, limit: int, completion_targets: int
    ) -> Iterator[None]:
        """Assesses the combinations that a picture suggests."""
        swept = sweep(picture)
        row = best_multiplier(swept)
        candidate = self.candidates[picture.candidate]
        candidate.attainable = min(candidate.attainable, attainable_price(picture, swept))
        suggested = core(
            picture,
            swept.codes[row],
            swept.multipliers[row],
            max_combinations=combinations,
            limit=limit,
        )
        both = make_targets(picture.candidate, np.concatenate([swept.codes, suggested]))
        first = {key: i for i, key in reversed(list(enumerate(self._keys(both)))) if key not in self.seen}
        if first:
            self._evaluate(take(both, np.sort(list(first.values()))), completion_targets, prices_all=False)
        yield

    def _refine(self, order: list[_Candidate]) -> Iterator[None]:
        """Changes, adds and undoes actions of every candidate's best target until nothing gets better."""
        for candidate in order:
            for _ in range(MAX_ROUNDS):
                key, loser = self.losers[candidate.index]
                if key[0] or candidate.price >= self._price() or not candidate.is_new(loser.found.target):
                    break
                yield from self._refine_around(candidate, loser.found)

    def _refine_around(self, candidate: _Candidate, centre: Found) -> Iterator[None]:
        """Assesses all single changes of a target and the combinations that they suggest."""
        candidate.refined.add(centre.target.codes.tobytes())
        around = self._around(centre.target, candidate)
        if not len(around):
            return
        assessment, prices = self._evaluate(around, 2 * len(around))
        yield
        picture = self._picture(centre, around, assessment, prices)
        yield from self._read(picture, CORE_COMBINATIONS, CORE_TARGETS, CORE_TARGETS)

    def _diversify(self, order: list[_Candidate]) -> Iterator[None]:
        """Refines around the best target known for every option of every owner, cheapest first.

        What the incumbent's neighbourhood hides, the best target with one owner kept or gone often shows.
        """
        while True:
            pool = [
                (found.price_ns, c.index, cell)
                for c in order
                for cell, found in c.elite.items()
                if c.price < self._price() and c.is_new(found.target)
            ]
            if not pool:
                return
            _, d, cell = min(pool)
            candidate = self.candidates[d]
            yield from self._refine_around(candidate, candidate.elite[cell])

    def _keep_elite(
        self, targets: TargetBatch, assessment: Assessment, prices: np.ndarray, can: np.ndarray
    ) -> None:
        """Remembers the cheapest feasible target for every (owner, option), in problems of few cells."""
        if self.num_victims * self.round.num_options > MAX_ELITE_CELLS:
            return
        rows = np.flatnonzero(can)
        for row in rows[np.argsort(prices[rows], kind="stable")].tolist():
            elite = self.candidates[int(targets.candidate[row])].elite
            price = int(prices[row])
            better = [
                cell
                for cell in enumerate(targets.codes[row].tolist())
                if cell not in elite or price < elite[cell].price_ns
            ]
            if better:
                one = np.array([row])
                found = Found(take(targets, one), _rows(assessment, one), price)
                elite.update(dict.fromkeys(better, found))

    def _around(self, target: TargetBatch, candidate: _Candidate) -> TargetBatch:
        """Returns all single changes of a target to options that the candidate's identity may take."""
        if candidate.picture is None:
            return take(target, np.zeros(0, np.int64))
        is_open = candidate.picture.is_open.copy()
        codes = target.codes[0]
        is_open[np.arange(len(codes)), codes] = False
        owner, code = np.nonzero(is_open)
        out = np.repeat(codes[None], len(owner), 0)
        out[np.arange(len(owner)), owner] = code
        return make_targets(candidate.index, out)

    def _deepen(self, candidate: _Candidate) -> Iterator[None]:
        """Enumerates further combinations: all of them if the budget allows, else the likeliest."""
        picture = candidate.picture
        if picture is None:
            return
        total = num_combinations(picture)
        if total - candidate.num_seen <= self.budget.max_targets - self.num_targets:
            options = [np.flatnonzero(row) for row in picture.is_open]
            grid = np.stack(np.meshgrid(*options, indexing="ij"), -1).reshape(total, self.num_victims)
            yield from self._try(make_targets(candidate.index, grid))
            return
        for around in self._starts(candidate):
            yield from self._read(around, DEEP_COMBINATIONS, BLOCK, BLOCK)

    def _transfer(self, order: list[_Candidate]) -> Iterator[None]:
        """Tries the victims of each candidate's best target under every other candidate."""
        rows = []
        for to in order:
            assert to.picture is not None
            source = to.identity.codes[0] == ABSENT
            for other in order:
                key, loser = self.losers[other.index]
                if other is to or key[0]:
                    continue
                codes = np.where(source, ABSENT, loser.found.target.codes[0])
                freed = np.flatnonzero((codes == ABSENT) & ~source)
                options = np.flatnonzero(to.picture.is_open[freed[0]]) if len(freed) else np.zeros(1, int)
                for code in options:
                    varied = codes.copy()
                    varied[freed] = code
                    rows.append((to.index, varied))
        if rows:
            which, codes = zip(*rows, strict=True)
            yield from self._try(make_targets(np.asarray(which), np.stack(codes)))

    def _exchange(self, order: list[_Candidate]) -> Iterator[None]:
        """Changes two owners of each candidate's best target at once, all pairs, while that is affordable.

        Two changes that share an object do not add up, so no picture predicts them.
        """
        for candidate in sorted(order, key=lambda c: self.losers[c.index][0]):
            centre = None
            while True:
                key, loser = self.losers[candidate.index]
                if key[0] or loser.found is centre or candidate.price >= self._price():
                    break
                centre = loser.found
                codes = centre.target.codes
                single = self._around(centre.target, candidate).codes
                owner = (single != codes).argmax(1)
                first, second = np.nonzero(owner[:, None] < owner[None, :])
                if not len(first) or len(first) > self.budget.max_targets - self.num_targets:
                    break
                pairs = single[first]
                pairs[np.arange(len(first)), owner[second]] = single[second, owner[second]]
                yield from self._try(make_targets(candidate.index, pairs))

    def _try(self, targets: TargetBatch) -> Iterator[None]:
        """Assesses what was not seen yet, in blocks."""
        first = {key: i for i, key in reversed(list(enumerate(self._keys(targets)))) if key not in self.seen}
        rows = np.sort(np.fromiter(first.values(), np.int64, len(first)))
        for at in range(0, len(rows), BLOCK):
            self._evaluate(take(targets, rows[at : at + BLOCK]), len(rows) - at, prices_all=False)
            yield

    # ------------------------------------------------------------ budgets and the incumbent

    def _evaluate(
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
        keys = self._keys(targets)
        fresh = [k not in self.seen for k in keys]
        cells = len(keys) * max(self.num_victims, 1)
        self._ask_time(cells, completion_targets * max(self.num_victims, 1), is_known)
        reason, room = self._room(len(keys))
        if reason is not None:
            counted = np.cumsum(fresh)
            rows = np.flatnonzero(counted <= room)
            targets, keys = take(targets, rows), [keys[i] for i in rows]
            fresh = [fresh[i] for i in rows]
            if sum(fresh) < room and len(rows) == len(counted):
                reason = None  # everything fitted after all
        before = self.clock()
        assessment = self.f.assess(targets)
        if prices_all:
            prices = self.f.value(targets, assessment)
        else:
            prices = np.full(len(targets), SATURATED, np.int64)
            rows = np.flatnonzero(assessment.fits)
            prices[rows] = self.f.value(take(targets, rows), _rows(assessment, rows))
        self.seen.update(keys)
        self.num_targets += sum(fresh)
        for d in np.unique(targets.candidate):
            self.candidates[int(d)].num_seen += int((np.asarray(fresh) & (targets.candidate == d)).sum())
        self.num_cells += len(keys) * self.num_victims
        can = self._offer(targets, assessment, prices)
        self._keep_elite(targets, assessment, prices, can)
        self.charged_ns += self.clock() - before
        self.charged_cells += max(len(keys), 1) * max(self.num_victims, 1)
        self.ns_per_cell = self.charged_ns / self.charged_cells
        if reason is not None:
            raise _Stop(reason)
        return assessment, prices

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

    def _ask_time(self, cells: int, completion_cells: int, is_known: bool) -> None:
        """Raises unless the next operation may run (G-10)."""
        used = self.clock() - self.start_ns
        attainable = min((c.attainable for c in self.candidates), default=self._price())
        forecast = Forecast(
            int(cells * self.ns_per_cell),
            int(max(cells, completion_cells) * self.ns_per_cell),
            SATURATED if self._price() >= SATURATED else self._price() - attainable,
            is_known,
        )
        got = allow(
            self.allowance, used, forecast, has_progressed=self.num_targets > self.assessed_at_renewal
        )
        if isinstance(got, StopReason):
            raise _Stop(got)
        if got is not self.allowance:
            self.assessed_at_renewal = self.num_targets
        self.allowance = got

    def _offer(
        self, targets: TargetBatch, assessment: Assessment, prices: np.ndarray, *, remember: bool = True
    ) -> np.ndarray:
        """Returns bool[B], feasible and adoptable by numbers, after the best of them became incumbent.

        The arena is asked only for targets that would become the incumbent (design 3.3).
        """
        can = assessment.fits.copy()
        rows = np.flatnonzero(can)
        if len(rows):
            can[rows] = self.f.adoptable(take(targets, rows))
        rows = np.flatnonzero(can & (prices <= self._price()))
        rows = rows[np.argsort(prices[rows], kind="stable")]
        at = 0
        done = False
        while at < len(rows) and not done:
            price = prices[rows[at]]
            end = at + int(np.searchsorted(prices[rows[at:]], price, side="right"))
            done = self._offer_equal(targets, assessment, int(price), rows[at:end])
            at = end
        if remember:
            self._remember(targets, assessment, prices, can)
        return can

    def _offer_equal(
        self, targets: TargetBatch, assessment: Assessment, price: int, rows: np.ndarray
    ) -> bool:
        """Returns whether the search among dearer rows can end, after trying rows of one price (O-12)."""
        ties: list[tuple[int, ...]] | None = None
        equals_best = self.best is not None and price == self.best.price_ns
        if len(rows) > 1 or equals_best:
            ties = self._ties(take(targets, rows), _rows(assessment, rows))
            order = sorted(range(len(rows)), key=ties.__getitem__)
            rows, ties = rows[order], [ties[i] for i in order]
            if equals_best:
                assert self.best is not None
                if self.best_tie is None:
                    self.best_tie = self._ties(self.best.target, self.best.assessment)[0]
        for i, row in enumerate(rows):
            if equals_best and ties is not None and self.best_tie is not None and ties[i] >= self.best_tie:
                return True
            one = np.array([row])
            found = Found(take(targets, one), _rows(assessment, one), price)
            if self._is_placed(found):
                self.num_improvements += self.best is not None
                self.best, self.best_tie = found, None if ties is None else ties[i]
                return True
        return False

    def _is_placed(self, found: Found) -> bool:
        """Returns whether the arena can execute the target; without Host KV copies nothing is asked."""
        if not found.assessment.d2h[0, 1:].any():
            return True
        return self.f.confirm(found.target).ok

    def _ties(self, targets: TargetBatch, assessment: Assessment) -> list[tuple[int, ...]]:
        keys = np.concatenate([self.f.tie_break(targets, assessment), targets.codes], 1)
        return [tuple(row) for row in keys.tolist()]

    def _remember(
        self, targets: TargetBatch, assessment: Assessment, prices: np.ndarray, can: np.ndarray
    ) -> None:
        """Keeps the most interesting target of every candidate for the explanation."""
        missing = assessment.residual.sum(1)
        for d in np.unique(targets.candidate):
            mine = np.flatnonzero(targets.candidate == d)
            row = int(mine[np.lexsort((prices[mine], missing[mine], ~can[mine]))[0]])
            key = (int(not can[row]), int(missing[row]), int(prices[row]))
            if int(d) not in self.losers or key < self.losers[int(d)][0]:
                one = np.array([row])
                found = Found(take(targets, one), _rows(assessment, one), int(prices[row]))
                reason = Rejection.PRICE
                if not can[row]:
                    fits = bool(assessment.fits[row])
                    reason = Rejection.NOT_ADOPTABLE if fits else Rejection.DOES_NOT_FIT
                self.losers[int(d)] = (key, Rejected(found, reason))

    def _price(self) -> int:
        return SATURATED if self.best is None else self.best.price_ns

    def _keys(self, targets: TargetBatch) -> list[int]:
        """Returns a 64-bit digest per target; equal targets have equal ones."""
        with np.errstate(over="ignore"):
            mixed = (targets.codes + 1) * self.weights[: self.num_victims]
            mixed = mixed.sum(1) + (targets.candidate + 1) * self.weights[self.num_victims]
        return mixed.tolist()

    def _result(self, stop: StopReason, first: Found | None = None) -> SearchResult:
        rejected = []
        for d, (_, loser) in sorted(self.losers.items()):
            if self.best is not None and d == int(self.best.target.candidate[0]):
                continue
            if loser.reason == Rejection.PRICE and loser.found.price_ns < self._price():
                loser = Rejected(loser.found, Rejection.ARENA)
            rejected.append(loser)
        rejected.sort(key=lambda x: x.found.price_ns)
        return SearchResult(
            self.best,
            stop,
            self.phase,
            self.is_fallback and self.best is first,
            first if first is not None else self.best,
            tuple(rejected),
            self.num_targets,
            self.num_cells,
            self.num_improvements,
            self.allowance.granted_ns,
            self.allowance.renewals,
            self.clock() - self.start_ns,
            self.licensed,
        )


def _rows(assessment: Assessment, rows: np.ndarray) -> Assessment:
    return jax.tree.map(lambda a: a[rows], assessment)
