"""The search under its scenario ids: identities, incumbents, ladder and licence, budgets, ties."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ninfer_jax.planner import (
    allowance,
    recency_ladder,
    search,
    search_model,
    search_session,
    search_steps,
)
from ninfer_jax.planner.allowance import StopReason
from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.cost import (
    Q32,
    SATURATED,
    MachineCostModel,
    PrefillModel,
    TransferCoefficients,
    TransferModel,
)
from ninfer_jax.planner.functions import physical_functions
from ninfer_jax.planner.ids import OwnerKind, Tier
from ninfer_jax.planner.operations import CheckpointSpec, add_owner
from ninfer_jax.planner.planning import search_round
from ninfer_jax.planner.portfolio import make_facts, make_value
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.publication import publication_slots
from ninfer_jax.planner.search import Rejection, SearchFunctions, SearchPhase, search_materialization
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP

FREE = TransferCoefficients(0, 0, 0)
PER_BYTE = TransferCoefficients(0, 0, Q32)
UNIT = MachineCostModel(TransferModel(PER_BYTE, PER_BYTE, FREE), PrefillModel(0, Q32, 0, 0, 0))
MS = 1_000_000
KNOWN = {"allowance", "cost", "target", "recency_ladder"} | {
    f"search_{name}" for name in ("model", "session", "steps", "types", "values")
}


class Round:
    """A problem with recorded calls and a clock that moves only when told to."""

    def __init__(
        self, state, candidates, *, model=UNIT, adoptable=None, recency=None, compiled=False, **facts
    ):
        self.problem = make_problem(state, candidates)
        physical = physical_functions(self.problem, compiled=compiled)
        value = make_value(self.problem, make_facts(self.problem, **facts), model)
        self.calls, self.now_ns, self.ns_per_assess = [], 0, 0
        self.round = search_round(self.problem, recency)
        self.functions = SearchFunctions(
            self._assess(physical.assess),
            self._log("confirm", physical.confirm),
            self._log("successors", physical.successors),
            value,
            value.tie_break,
            adoptable(self.problem) if adoptable else publication_slots(self.problem, vacant=1),
        )

    def _log(self, name, function):
        def logged(*args, **kwargs):
            self.calls.append((name, args[0]))
            return function(*args, **kwargs)

        return logged

    def _assess(self, function):
        def logged(targets):
            self.calls.append(("assess", targets))
            self.now_ns += self.ns_per_assess
            return function(targets)

        return logged

    def plan(self, **budget):
        defaults = dict(deadline_ns=10**15, first_window_ns=10**15)
        return search_materialization(
            self.round, self.functions, Budget(**(defaults | budget)), lambda: self.now_ns
        )

    def assessed(self):
        return [t for name, t in self.calls if name == "assess"]


def machine(*, pages, slots=20, host_states=0, host_pages=0):
    return make_state(
        make_capacity(
            device_state_slots=slots,
            device_pages=pages,
            host_state_slots=host_states,
            host_kv_granules=host_pages,
            granule_bytes=10,
            state_image_bytes=100,
        )
    )


def evicted(result, problem):
    return {int(o) for o in problem.victims[result.best.target.codes[0] == EVICT]}


def full_machine(sizes, *, free=0, kinds=None, **host):
    """Owners of `sizes` pages, one checkpoint each, `free` pages left."""
    state = machine(pages=sum(sizes) + free, **host)
    owners = []
    for i, pages in enumerate(sizes):
        state, o = add_owner(
            state, [CheckpointSpec(64 * pages)], kind=(kinds or {}).get(i, OwnerKind.PRIVATE)
        )
        owners.append(o)
    return state, owners


def root_of(pages):
    return [root_candidate(make_request(64 * pages, 0))]


def test_the_search_knows_only_what_it_is_given():  # design 3.4
    for module in (search, search_model, search_session, search_steps, recency_ladder, allowance):
        names = set()
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ninfer_jax"):
                names.add(node.module.rsplit(".", 1)[1])
        assert names <= KNOWN


# ---------------------------------------------------------------- identities and incumbents


def test_plan_01_no_pressure_path():  # G-2
    state, (_x, _) = full_machine([4, 4], free=20)
    request = make_request(300, 0)
    r = Round(state, [root_candidate(request), Candidate(1, 0, Disposition.CONSUME, request)])
    result = r.plan()
    assert result.stop == StopReason.NO_PRESSURE
    assert result.best.target.candidate[0] == 1
    assert result.best.assessment.degraded[0] == 0
    assert [len(t) for t in r.assessed()] == [2]
    assert all(name != "successors" for name, _ in r.calls)


def test_plan_04_root_maximal_is_the_safety_net():  # G-4, G-11
    state, _ = full_machine([4, 4])
    r = Round(state, root_of(5))
    result = r.plan(max_targets=0, deadline_ns=0)
    assert result.is_fallback
    assert (result.best.target.codes == EVICT).all()
    assert result.stop == StopReason.TIME_BUDGET
    assert result.num_targets == 0
    counted = r.plan(max_targets=0)
    assert (counted.best.target.codes == EVICT).all()
    assert counted.stop == StopReason.TARGET_BUDGET


def test_another_candidate_is_found_when_root_cannot_fit():
    """A protected source's pages are reused, so its candidate needs less than root (infeasible_missed)."""
    state = machine(pages=9)
    state, s = add_owner(state, [CheckpointSpec(64 * 6)], kind=OwnerKind.SHARED)
    state = dataclasses.replace(state, owner_pins=np.where(np.arange(len(state.owner_pins)) == s, 1, 0))
    request = make_request(64 * 8, 0)
    r = Round(state, [root_candidate(request), Candidate(1, 0, Disposition.RETAIN, request)])
    assert r.plan().best.target.candidate[0] == 1
    blocked = Round(state, [root_candidate(request)]).plan()
    assert blocked.best is None
    assert blocked.rejected[0].reason == Rejection.DOES_NOT_FIT


def test_plan_24_all_identities_are_read_first():  # G-2
    state, _ = full_machine([4, 4, 4], free=1)
    request = make_request(64 * 6, 0)
    sources = [Candidate(i + 1, c, Disposition.CONSUME, request) for i, c in enumerate((0, 1))]
    r = Round(state, [root_candidate(request), *sources])
    r.plan()
    first = r.assessed()[0]
    assert first.candidate.tolist() == [0, 1, 2]
    assert ((first.codes == KEEP) | (first.codes == ABSENT)).all()


def test_an_improvable_identity_is_expanded():  # G-2: evicting the alias turns the Fork into a Move
    state = machine(pages=20)
    state, x = add_owner(state, [CheckpointSpec(128)])
    image = int(state.checkpoint_image[0])
    state, s = add_owner(
        state, [CheckpointSpec(128, image=image)], kind=OwnerKind.SHARED, share_with=x, share_tokens=128
    )
    dear = TransferCoefficients(10_000, 0, 0)
    model = dataclasses.replace(UNIT, transfer=TransferModel(PER_BYTE, PER_BYTE, dear))
    request = make_request(200, 0)
    r = Round(state, [root_candidate(request), Candidate(1, 0, Disposition.CONSUME, request)], model=model)
    result = r.plan()
    assert result.first.price_ns == 200  # root; the source costs 72 + 10,000
    assert result.best.target.candidate[0] == 1
    assert evicted(result, r.problem) == {s}
    assert result.best.price_ns == 72  # the shared owner has no public value


def test_plan_21_cost_cannot_change_feasibility():  # O-1
    endless = TransferCoefficients(SATURATED, SATURATED, SATURATED)
    model = dataclasses.replace(UNIT, transfer=TransferModel(endless, endless, endless))
    state, _ = full_machine([4], free=2, host_states=4, host_pages=20)
    r = Round(
        state, root_of(5), model=model, adoptable=lambda p: lambda t: (t.codes != EVICT).all(1)
    )  # only demotion is adoptable
    # root maximal is refused by the manager, so the incumbent must be found elsewhere or not at all
    assert r.plan().best is None
    keep = full_machine([4], free=2, host_states=4, host_pages=20)[0]
    both = Round(
        keep,
        root_of(5),
        model=model,
        recency=np.array([5]),
        adoptable=lambda p: lambda t: (t.codes != EVICT).all(1),
    )
    result = both.plan()
    assert result.best.price_ns == SATURATED
    assert result.best.assessment.d2h.any()


def test_plan_25_a_stopped_session_leaves_nothing():  # G-12
    state, _ = full_machine([4, 4])
    before = [getattr(state, f.name) for f in dataclasses.fields(state)]
    copies = [b.copy() if isinstance(b, np.ndarray) else b for b in before]
    Round(state, root_of(5)).plan(max_targets=3)
    for a, b in zip(before, copies, strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


# ---------------------------------------------------------------- choices


def test_least_loss_is_evicted():
    state, _owners = full_machine([2, 6, 3, 3])
    r = Round(state, root_of(3))
    assert len(evicted(r.plan(), r.problem)) == 1
    assert r.plan().best.price_ns == 3 * 64 + 4 * 3 * 64


def test_plan_22_source_choice_is_by_price_not_by_match():
    for frontier, chosen, price in ((64, 0, 600), (384, 1, 376)):
        state = machine(pages=40, host_states=2, host_pages=20)
        state, _ = add_owner(
            state,
            [CheckpointSpec(frontier)],
            kind=OwnerKind.SHARED,
            kv_tier=Tier.HOST,
            state_tier=Tier.HOST,
        )
        request = make_request(600, 0)
        r = Round(state, [root_candidate(request), Candidate(1, 0, Disposition.RETAIN, request)])
        result = r.plan()
        assert (int(result.best.target.candidate[0]), result.best.price_ns) == (chosen, price)


def test_joint_release_is_found():  # T-6: neither owner frees the shared pages alone
    state = machine(pages=12)
    state, s = add_owner(state, [CheckpointSpec(640)], kind=OwnerKind.SHARED)
    state, x = add_owner(state, [CheckpointSpec(640)], share_with=s, share_tokens=640)
    state, _ = add_owner(state, [CheckpointSpec(128)])
    r = Round(state, root_of(10))
    assert evicted(r.plan(), r.problem) == {s, x}


def test_the_arena_decides_before_anything_becomes_incumbent():  # G-8, K-7
    state, _ = full_machine([4, 4], host_states=8, host_pages=20)
    r = Round(state, root_of(4))
    asked = []

    def refuse(target):
        asked.append(target)
        return dataclasses.replace(r_confirm(target), ok=False)

    r_confirm = r.functions.confirm
    r.functions = dataclasses.replace(r.functions, confirm=refuse)
    result = r.plan()
    assert asked
    assert not result.best.assessment.d2h[0, 1:].any()  # only copies of KV need a hole


# ---------------------------------------------------------------- recency ladder and licence


def ladder(*, free_pages=0, **host):
    """A(9, 4 pages), shared S(7, 4), B(5, 2), D(2, 1); epochs in brackets."""
    state, owners = full_machine([4, 4, 2, 1], free=free_pages, kinds={1: OwnerKind.SHARED}, **host)
    return state, owners, np.array([9, 7, 5, 2])


def test_plan_06_smallest_sacrifice_rung():  # G-7
    state, (_a, _s, b, d), recency = ladder()
    r = Round(state, root_of(3), recency=recency)
    result = r.plan()
    assert evicted(result, r.problem) == {d, b}
    assert not result.is_fallback
    assert result.licensed.tolist() == [False, False, True, True]


def test_plan_07_with_host_room_nothing_is_evicted():
    state, _, recency = ladder(host_states=10, host_pages=40)
    r = Round(state, root_of(3), recency=recency)
    result = r.plan()
    assert evicted(result, r.problem) == set()
    assert result.best.assessment.d2h.any()
    assert not result.licensed.any()


def test_plan_10_a_feasible_identity_licenses_no_eviction():
    state = machine(pages=12)
    state, _ = add_owner(state, [CheckpointSpec(64 * 8)])
    state, _ = add_owner(state, [CheckpointSpec(64)])
    request = make_request(64 * 10, 0)
    candidates = [root_candidate(request), Candidate(1, 0, Disposition.CONSUME, request)]
    r = Round(state, candidates, recency=np.array([3, 1]))
    result = r.plan()
    assert not result.licensed.any()
    for targets in r.assessed():
        assert not (targets.codes == EVICT).any() or len(targets) == len(candidates)
    assert evicted(result, r.problem) == set()


def test_plan_11_a_fresh_publication_counts_as_recent():
    state, (_p1, p2) = full_machine([3, 3])
    published, hit = np.array([8, 1]), np.array([-1, 6])
    r = Round(state, root_of(3), recency=np.maximum(published, hit))
    assert evicted(r.plan(), r.problem) == {p2}


def test_plan_13_publication_only_admission_uses_the_smallest_rung():
    state, (_a, b) = full_machine([2, 2], free=20)
    r = Round(
        state,
        root_of(3),
        recency=np.array([9, 2]),
        adoptable=lambda p: publication_slots(p, vacant=0),
    )
    result = r.plan()
    assert evicted(result, r.problem) == {b}
    assert result.licensed.tolist() == [False, True]


def test_unneeded_sacrifices_are_spared():  # design 6
    state, (_a, _b, c) = full_machine([3, 1, 6])
    r = Round(state, root_of(5), recency=np.array([9, 5, 7]))
    result = r.plan()
    assert evicted(result, r.problem) == {c}  # rung 2 was b and c; b turned out unneeded
    assert result.licensed.tolist() == [False, False, True]


def test_without_the_switch_everything_may_go():
    state, _owners, _ = ladder()
    r = Round(state, root_of(3))
    assert r.plan().licensed.all()


# ---------------------------------------------------------------- budgets and stop reasons


def pressured(num_owners=8, pages=3, need=9, **kwargs):
    state, _ = full_machine([pages + i % 3 for i in range(num_owners)], host_states=30, host_pages=100)
    return Round(state, root_of(need), **kwargs)


def test_plan_14_zero_optional_time_keeps_the_identity():
    state = machine(pages=11)
    state, _ = add_owner(state, [CheckpointSpec(64 * 5)], kind=OwnerKind.SHARED)
    state, _ = add_owner(state, [CheckpointSpec(64)], kind=OwnerKind.SHARED)
    request = make_request(320, 0)
    cheap = Candidate(1, 0, Disposition.RETAIN, make_request(64 * 11, 0))
    r = Round(state, [root_candidate(request), cheap])
    result = r.plan(deadline_ns=0)
    assert result.stop == StopReason.TIME_BUDGET
    assert result.best.target.candidate[0] == 0
    assert result.best.assessment.degraded[0] == 0


@pytest.mark.parametrize("n", [1, 7, 50])
def test_plan_16_target_budget(n):
    r = pressured()
    result = r.plan(max_targets=n)
    assert result.stop == StopReason.TARGET_BUDGET
    assert result.num_targets == n
    assert result.best is not None
    seen = {
        (int(c), codes.tobytes())
        for t in r.assessed()[2:]
        for c, codes in zip(t.candidate, t.codes, strict=True)
    }
    assert len(seen) <= n


def test_more_targets_never_make_it_worse():
    prices = [pressured().plan(max_targets=n).best.price_ns for n in (0, 10, 100, 1000, 4096)]
    assert prices == sorted(prices, reverse=True)


def test_arena_and_work_budgets():
    assert pressured().plan(arena_targets=5).stop == StopReason.EXPANSION_CAPACITY
    assert pressured().plan(max_work=8 * 5).stop == StopReason.WORK_BUDGET
    assert pressured().plan(max_work=8 * 5).num_cells <= 8 * 5


def test_queue_exhausted():
    state, _ = full_machine([4, 4])
    assert Round(state, root_of(5)).plan().stop == StopReason.QUEUE_EXHAUSTED


def test_plan_20_an_operation_that_cannot_fit_stops_the_search():
    r = pressured()
    r.ns_per_assess = 3 * MS
    result = r.plan(deadline_ns=20 * MS, first_window_ns=20 * MS)
    assert result.stop in (StopReason.TIME_BUDGET, StopReason.INSUFFICIENT_EXPECTED_GAIN)
    assert result.used_ns <= 23 * MS  # the two mandatory assessments are not charged, but take time


def test_plan_18_incomplete_forecast_gets_bounded_exploration():
    r = pressured()
    r.ns_per_assess = 4 * MS
    result = r.plan(first_window_ns=5 * MS, deadline_ns=10**12)
    assert result.stop == StopReason.INSUFFICIENT_EXPECTED_GAIN
    assert result.used_ns < 50 * MS


def test_a_cheap_incumbent_is_not_worth_thinking_about():
    state, _ = full_machine([4, 4])
    free = dataclasses.replace(UNIT, prefill=PrefillModel(0, 1, 0, 0, 0))
    r = Round(state, root_of(5), model=free)
    assert r.plan().stop == StopReason.INSUFFICIENT_EXPECTED_GAIN
    assert r.plan().phase == SearchPhase.NONE


# ---------------------------------------------------------------- ties


def test_tie_05_session_binding_then_ordinals():  # O-12
    state, _ = full_machine([2, 2], free=20)
    request = make_request(128, 0)

    def candidates(binding):
        return [
            root_candidate(request),
            *(Candidate(i, i - 1, Disposition.CONSUME, request, i == binding) for i in (1, 2)),
        ]

    for binding, wanted in ((2, 2), (1, 1), (0, 1)):
        r = Round(state, candidates(binding))
        assert {int(r.plan().best.target.candidate[0]) for _ in range(10)} == {wanted}


def test_tie_01_hits_come_before_evictions():
    """Two owners of 2 pages without hits, or one of 4 pages with hits; the losses are equal."""
    state = machine(pages=8)
    state, a = add_owner(state, [CheckpointSpec(128)], kind=OwnerKind.SHARED)
    state, b = add_owner(state, [CheckpointSpec(128)], kind=OwnerKind.SHARED)
    state, c = add_owner(state, [CheckpointSpec(256)], kind=OwnerKind.SHARED)
    r = Round(state, root_of(4), hits={2: (3, 7)})
    assert evicted(r.plan(), r.problem) == {a, b}
    r = Round(state, root_of(4))
    assert evicted(r.plan(), r.problem) == {c}


def test_tie_04_less_prefill_then_more_reuse():
    """Prefill is free of charge, so that only the tie-break sees it."""
    state, _ = full_machine([2, 3], free=20)
    free = MachineCostModel(UNIT.transfer, PrefillModel(100, 0, 0, 0, 0))
    request = make_request(300, 0)
    candidates = [
        root_candidate(request),
        *(Candidate(i, i - 1, Disposition.CONSUME, request) for i in (1, 2)),
    ]
    assert Round(state, candidates, model=free).plan().best.target.candidate[0] == 2
    long = make_request(300, 0), make_request(260, 0)  # 172 left after 128, 68 left after 192
    swapped = [root_candidate(long[0]), *(dataclasses.replace(c, request=long[0]) for c in candidates[:0:-1])]
    assert Round(state, swapped, model=free).plan().best.target.candidate[0] == 1
