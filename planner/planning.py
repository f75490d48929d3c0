"""One call that plans a materialisation: the physical half, the prices and the search, wired together.

Owns: the wiring, and the order gate -> search -> seal -> readiness. Each part is usable without it. Nothing
of a round survives it except the returned values (G-12).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from ninfer_jax.planner.cost import MachineCostModel, batch_ns
from ninfer_jax.planner.extents import Blocked
from ninfer_jax.planner.functions import PhysicalFunctions, physical_functions
from ninfer_jax.planner.options import Extent, ReplicaAction, Survivors
from ninfer_jax.planner.plan import Readiness, ResourcePlan
from ninfer_jax.planner.portfolio import CacheFacts, PortfolioValue, make_value
from ninfer_jax.planner.problem import Problem, identity_targets, maximal_targets
from ninfer_jax.planner.readiness import gate, readiness
from ninfer_jax.planner.search import (
    Found,
    PressureDomain,
    SearchFunctions,
    SearchResult,
    SearchRound,
    search_materialization,
)
from ninfer_jax.planner.search_types import Adoptable, Budget, Clock
from ninfer_jax.planner.shared_capture import CaptureScenario, NetGain
from ninfer_jax.planner.target import KEEP
from ninfer_jax.planner.transition import seal


@dataclass(frozen=True)
class PriceSplit:
    """J of one target by cause, nanoseconds."""

    prefill_ns: int
    pressure_ns: int  # Device to Host copies that make room
    restore_ns: int  # Host to Device copies of the source
    copy_ns: int  # state forks and partial tails on Device
    public_ns: int  # lost empirical value and shared credit
    private_ns: dict[int, int]  # weighted loss of each private owner row that loses

    @property
    def total_ns(self) -> int:
        """The sum, before saturation."""
        now = self.prefill_ns + self.pressure_ns + self.restore_ns + self.copy_ns
        return now + self.public_ns + sum(self.private_ns.values())


@dataclass(frozen=True, eq=False)
class Planned:
    """What one planning call decided.

    Attributes:
        search: None when the gate answered (`readiness` says how).
        plan: sealed plan of `search.best`; None if there is none.
        price: the chosen target's price by cause.
        readings: what the clock said, in order; a clock that repeats them repeats the plan bit for bit.
    """

    readiness: Readiness
    search: SearchResult | None
    plan: ResourcePlan | None
    price: PriceSplit | None
    readings: tuple[int, ...]


def plan_materialization(
    problem: Problem,
    facts: CacheFacts,
    model: MachineCostModel,
    *,
    adoptable: Adoptable,
    budget: Budget,
    clock: Clock,
    recency: np.ndarray | None = None,
    intent: tuple[int, ...] = (),
    functions: PhysicalFunctions | None = None,
) -> Planned:
    """Returns the readiness of the problem's request and, if it can start, the sealed plan.

    Args:
        facts: `make_facts(problem, ...)`.
        model: prices; they choose among feasible targets only (O-1).
        adoptable: whether an end state can be published, e.g. `publication_slots(problem, vacant=1)`.
        recency: int64[O], newest hit or publication of each owner row, -1 for none; None is
            `recency_eviction` off (G-7).
        intent: the caller's schedule intent, consumed by seal (G-3).
        functions: the physical functions to use; None makes them.
    Raises:
        ValueError: if the candidates do not share one request, or the first is not root.
    """
    request = problem.candidates[0].request
    if not problem.candidates[0].is_root:
        raise ValueError("the first candidate must be root (N-1), got a checkpoint source")
    early = gate(problem.state, request)
    if early is not None:
        return Planned(early, None, None, None, ())
    functions = functions or physical_functions(problem)
    value = make_value(problem, facts, model)
    recorder = _Recorder(clock)
    result = search_materialization(
        search_round(problem, None if recency is None else recency[problem.victims]),
        SearchFunctions(
            functions.assess, functions.confirm, functions.successors, value, value.tie_break, adoptable
        ),
        budget,
        recorder,
    )
    plan = price = None
    if result.best is not None:
        best = result.best
        sealed = seal(
            problem,
            best.target,
            intent=intent,
            assessment=best.assessment,
            placement=functions.placement(best.target),
        )
        assert not isinstance(sealed, Blocked), "a confirmed target fits the arena"
        plan, price = sealed, price_split(value, result.best)
    answer = readiness(problem.state, request, None if result.best is None else result.best.assessment)
    return Planned(answer, result, plan, price, tuple(recorder.readings))


def price_split(value: PortfolioValue, found: Found) -> PriceSplit:
    """Returns J of an assessed target by cause."""
    a, which = found.assessment, int(found.target.candidate[0])
    sizes = value.problem.state.capacity.item_bytes()
    model = value.model.transfer

    def moved(coefficients_of: str, units: np.ndarray, ops: np.ndarray) -> int:
        num_bytes = sum(int(u) * b for u, b in zip(units[0], sizes, strict=True))
        return batch_ns(getattr(model, coefficients_of), int(ops[0].sum()), num_bytes)

    losses = value.owner_losses(found.target) if a.degraded[0] else {}
    future = int(value.future(found.target)[0])
    return PriceSplit(
        int(value.prefill[which]),
        moved("d2h", a.d2h, a.d2h_ops),
        moved("h2d", a.h2d, a.h2d_ops),
        moved("d2d", a.d2d, a.d2d),
        max(future - sum(losses.values()), 0),
        losses,
    )


def improvable(problem: Problem) -> np.ndarray:
    """Returns bool[D], candidates that could get cheaper by pressure although their identity fits.

    Only a consumed source whose state or tail is copied because others still hold it (G-2).
    """
    return np.asarray([c.is_improvable for c in problem.identity_changes])


def preserve_codes(problem: Problem) -> np.ndarray:
    """Returns int32[V], the option that demotes a whole owner to Host; KEEP where it would change nothing."""
    everything = (Survivors.ALL, ReplicaAction.DEMOTE, ReplicaAction.DEMOTE)
    for code, t in enumerate(problem.options.templates):
        if (t.survivors, t.state, t.kv) == everything and t.state_extent == t.kv_extent == Extent.EVERYTHING:
            return np.where(problem.options.valid[:, code], code, KEEP).astype(np.int32)
    return np.full(problem.num_victims, KEEP, np.int32)


def search_round(problem: Problem, recency: np.ndarray | None = None) -> SearchRound:
    """Returns what the search is told about a problem.

    Args:
        recency: int64[V], newest hit or publication of each victim, -1 for none; None switches G-7 off.
    """
    return SearchRound(
        identity_targets(problem),
        problem.state.capacity.units(),
        improvable(problem),
        problem.num_options,
        lambda: PressureDomain(maximal_targets(problem), preserve_codes(problem)),
        recency,
    )


def capture_scenario(
    problem: Problem,
    net_gain: NetGain,
    *,
    adoptable: Adoptable,
    may_degrade: bool = True,
    functions: PhysicalFunctions | None = None,
) -> CaptureScenario:
    """Returns one scenario of `plan_shared_capture` over a problem made for `capture_candidate`."""
    functions = functions or physical_functions(problem)
    return CaptureScenario(
        identity_targets(problem),
        maximal_targets(problem),
        problem.state.capacity.units(),
        problem.num_options,
        functions.assess,
        functions.confirm,
        functions.successors,
        net_gain,
        adoptable,
        may_degrade,
    )


@dataclass(eq=False)
class _Recorder:
    """A clock that remembers what it said; counted from the first reading."""

    clock: Clock
    readings: list[int] = field(default_factory=list)
    start_ns: int | None = None

    def __call__(self) -> int:
        now = self.clock()
        if self.start_ns is None:
            self.start_ns = now
        self.readings.append(now - self.start_ns)
        return self.readings[-1]
