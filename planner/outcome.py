"""PlanOutcome: what a planning call decided and why, for a person, for a file, and for a replay.

Owns: the facts of a decision as plain values, their one-screen explanation, the file format's two sections,
and `decide`, which plans from `PlanInputs`. Chooses nothing: the search does.

    outcome = decide(inputs, clock)            plans, and remembers what the clock said
    print(outcome.explain())
    again = from_json(outcome.to_json())
    assert not differences(again, replay(again))   # same file, same plan, bit for bit

Letters: R axes, S stages.
"""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.capacity import axis_names
from ninfer_jax.planner.codec import encode
from ninfer_jax.planner.cost import SATURATED
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef, OwnerKind
from ninfer_jax.planner.options import Extent, ReplicaAction, Survivors, Template
from ninfer_jax.planner.plan import Readiness, Step
from ninfer_jax.planner.planning import Planned, plan_materialization
from ninfer_jax.planner.problem import Problem, base_tokens, make_problem
from ninfer_jax.planner.problem_json import PlanInputs, ReplayClock, check_inputs, read, write
from ninfer_jax.planner.publication import publication_slots
from ninfer_jax.planner.resolution import resolve
from ninfer_jax.planner.search import Found
from ninfer_jax.planner.search_types import Clock
from ninfer_jax.planner.target import KEEP

MAX_OWNER_LINES: Final = 12
MAX_REJECTED_LINES: Final = 5
LINE_WIDTH: Final = 120
STAGE_TITLES: Final = ("start", "releases", "prepare", "in flight", "publish", "restore", "commit")


@dataclass(frozen=True)
class SourceFact:
    """What the request starts from; owner -1 for root."""

    candidate: int
    owner: int
    checkpoint: int
    kind: str
    reused_tokens: int
    prefill_tokens: int
    consumed: bool


@dataclass(frozen=True)
class OwnerFact:
    """What becomes of one inactive owner that does not stay as it is."""

    owner: int
    kind: str
    fate: str
    num_checkpoints: int
    num_dropped: int
    evicted: bool
    d2h_images: int
    d2h_pages: int
    device_pages_freed: int


@dataclass(frozen=True)
class PriceFact:
    """J by cause, nanoseconds."""

    total_ns: int
    prefill_ns: int
    pressure_ns: int
    restore_ns: int
    copy_ns: int
    public_ns: int
    private_ns: tuple[tuple[int, int], ...]  # owner row, loss


@dataclass(frozen=True)
class AlternativeFact:
    """The best target of a candidate that was not chosen."""

    source: SourceFact
    reason: str
    price_ns: int
    missing: tuple[int, ...]  # int[R], units missing at the peak
    degraded: int
    evictions: int


@dataclass(frozen=True)
class SearchFact:
    """How the search went and what it cost."""

    stop: str
    stop_meaning: str
    phase: str
    is_fallback: bool
    first_price_ns: int  # the incumbent before optional work; -1 if there was none
    num_targets: int
    num_cells: int
    num_improvements: int
    granted_ns: int
    renewals: int
    used_ns: int


@dataclass(frozen=True)
class Decision:
    """One planning call's answer. Absent parts are None: the gate answered, or nothing was adoptable."""

    readiness: Readiness
    plan_id: str
    codes: tuple[int, ...]
    source: SourceFact | None
    owners: tuple[OwnerFact, ...]
    used: tuple[tuple[int, ...], ...]  # int[S + 1, R]; row 0 is the start state
    steps: tuple[str, ...]
    price: PriceFact | None
    search: SearchFact | None
    rejected: tuple[AlternativeFact, ...]


@dataclass(frozen=True, eq=False)
class PlanOutcome:
    """Everything needed to explain one planning call and to repeat it."""

    inputs: PlanInputs
    decision: Decision

    def explain(self) -> str:
        """Returns the decision for a person, at most one screen."""
        return explain(self)

    def to_json(self) -> str:
        """Returns the text of a plan file."""
        return write({"inputs": self.inputs, "decision": self.decision})


def decide(inputs: PlanInputs, clock: Clock) -> PlanOutcome:
    """Returns the planned outcome; its inputs hold the clock's readings.

    Raises:
        ValueError: if the inputs do not make a problem.
    """
    problem = make_problem(inputs.state, inputs.candidates, max_options=inputs.max_options)
    planned = plan_materialization(
        problem,
        inputs.facts,
        inputs.model,
        adoptable=publication_slots(problem, vacant=inputs.vacant, publishes=inputs.publishes),
        budget=inputs.budget,
        clock=clock,
        recency=inputs.recency,
        intent=inputs.intent,
    )
    return make_outcome(inputs, problem, planned)


def replay(outcome: PlanOutcome) -> PlanOutcome:
    """Returns what the same inputs and the same clock readings give now."""
    return decide(outcome.inputs, ReplayClock(outcome.inputs.readings))


def from_json(text: str | bytes) -> PlanOutcome:
    """Returns the outcome that `PlanOutcome.to_json` wrote.

    Raises:
        ValueError: in one line, for a damaged, foreign or inconsistent file.
    """
    got = read(text, {"inputs": PlanInputs, "decision": Decision})
    for name, value in got.items():
        if value is None:
            raise ValueError(f"plan file: {name} is missing")
    check_inputs(got["inputs"])
    _check_decision(got["inputs"], got["decision"])
    return PlanOutcome(got["inputs"], got["decision"])


def differences(a: PlanOutcome, b: PlanOutcome) -> tuple[str, ...]:
    """Returns the members of two decisions that differ, by path; empty if they are equal bit for bit."""
    return tuple(_paths(encode(a.decision), encode(b.decision), "decision"))


def make_outcome(inputs: PlanInputs, problem: Problem, planned: Planned) -> PlanOutcome:
    """Returns the outcome of a planning call that was made with `inputs`."""
    result, plan, price = planned.search, planned.plan, planned.price
    search = best = None
    rejected: tuple[AlternativeFact, ...] = ()
    if result is not None:
        best = result.best
        search = SearchFact(
            result.stop.name.lower(),
            result.stop.value,
            result.phase.value,
            result.is_fallback,
            -1 if result.first is None else result.first.price_ns,
            result.num_targets,
            result.num_cells,
            result.num_improvements,
            result.granted_ns,
            result.renewals,
            result.used_ns,
        )
        rejected = tuple(_alternative(problem, r.found, r.reason.value) for r in result.rejected)
    decision = Decision(
        planned.readiness,
        "" if plan is None else plan.plan_id,
        () if best is None else tuple(best.target.codes[0].tolist()),
        None if best is None else _source(problem, int(best.target.candidate[0])),
        () if best is None else _owners(problem, best),
        () if plan is None else tuple(tuple(row) for row in plan.used.tolist()),
        () if plan is None else tuple(_step(s) for s in plan.steps),
        None
        if price is None or best is None
        else PriceFact(
            best.price_ns,
            price.prefill_ns,
            price.pressure_ns,
            price.restore_ns,
            price.copy_ns,
            price.public_ns,
            tuple(sorted(price.private_ns.items())),
        ),
        search,
        rejected,
    )
    return PlanOutcome(replace(inputs, readings=planned.readings), decision)


# ---------------------------------------------------------------- facts


def _source(problem: Problem, which: int) -> SourceFact:
    candidate, state = problem.candidates[which], problem.state
    reused = base_tokens(problem, which)
    left = max(candidate.request.prompt_tokens - reused, 0)
    if candidate.checkpoint is None:
        return SourceFact(which, -1, -1, "root", 0, left, False)
    row = int(candidate.checkpoint)
    return SourceFact(
        which,
        int(state.checkpoint_owner[row]),
        row,
        CheckpointKind(int(state.checkpoint_kind[row])).name.lower(),
        reused,
        left,
        candidate.disposition == Disposition.CONSUME,
    )


def _alternative(problem: Problem, found: Found, reason: str) -> AlternativeFact:
    a = found.assessment
    return AlternativeFact(
        _source(problem, int(found.target.candidate[0])),
        reason,
        found.price_ns,
        tuple(a.residual[0].tolist()),
        int(a.degraded[0]),
        int(a.evictions[0]),
    )


def _owners(problem: Problem, found: Found) -> tuple[OwnerFact, ...]:
    """Returns one fact per degraded owner; a shared object counts for the first owner that holds it."""
    resolution, state = resolve(problem, found.target), problem.state
    codes = found.target.codes[0]
    code_of = {int(o): int(c) for o, c in zip(problem.victims, codes, strict=True)}
    facts = []
    for owner in resolution.degraded:
        mine = [p for p in resolution.pieces if p.owner_row == owner]
        copied = [p for p in mine if p.copies_d2h]
        freed = [p for p in mine if p.item and p.had_device and not p.on_device]
        dropped = sum(int(state.checkpoint_owner[c]) == owner for c in resolution.dropped)
        facts.append(
            OwnerFact(
                owner,
                OwnerKind(int(state.owner_kind[owner])).name.lower(),
                describe(problem.options.templates[code_of.get(owner, KEEP)]),
                int(np.count_nonzero(state.checkpoint_owner == owner)),
                dropped,
                owner in resolution.evicted,
                sum(p.size for p in copied if not p.item),
                sum(p.size for p in copied if p.item),
                sum(p.size for p in freed),
            )
        )
    return tuple(facts)


def describe(template: Template) -> str:
    """Returns an option in words.

    >>> describe(Template(Survivors.ONLY_DEEPEST, kv=ReplicaAction.DEMOTE))
    'keep the deepest checkpoint; pages to Host'
    """
    j = template.argument
    who = {
        Survivors.ALL: "",
        Survivors.NOBODY: "evict",
        Survivors.WITHOUT_DEEPEST: f"drop the {j} deepest checkpoints",
        Survivors.WITHOUT_SHALLOWEST: f"drop the {j} shallowest checkpoints",
        Survivors.ONLY_DEEPEST: "keep the deepest checkpoint",
        Survivors.ONLY_SHALLOWEST: "keep the shallowest checkpoint",
        Survivors.WITHOUT_DEEPEST_SIZED: "drop as many deep checkpoints as needed",
        Survivors.EXACTLY: f"keep checkpoints {[i for i in range(j.bit_length()) if j >> i & 1]}",
    }[template.survivors]
    does = {
        ReplicaAction.DROP_HOST: "{} without the second copy on Host",
        ReplicaAction.DROP_DEVICE: "{} on Host only where a copy is there",
        ReplicaAction.DEMOTE: "{} to Host",
    }
    parts = [who] if who else []
    for what, action, extent in (
        ("images", template.state, template.state_extent),
        ("pages", template.kv, template.kv_extent),
    ):
        if action != ReplicaAction.NONE:
            name = what if extent == Extent.EVERYTHING else f"just enough {what}"
            parts.append(does[action].format(name))
    return "; ".join(parts) or "stays"


def _step(step: Step) -> str:
    """Returns a sealed step as one line of named members; equal steps give equal lines."""
    parts = []
    for name, value in step._asdict().items():
        if value is not None and value != step._field_defaults.get(name):
            shown = getattr(value, "name", value)
            if isinstance(value, CheckpointRef):
                shown = ",".join(str(int(getattr(value, m.name))) for m in dataclasses.fields(value))
            parts.append(f"{name}={shown}")
    return " ".join(parts)


def _check_decision(inputs: PlanInputs, decision: Decision) -> None:
    axes = inputs.state.capacity.num_axes
    rows = [*decision.used, *(a.missing for a in decision.rejected)]
    if any(len(row) != axes for row in rows) or len(decision.used) not in (0, len(STAGE_TITLES)):
        raise ValueError(f"decision: occupancy must have {axes} axes and {len(STAGE_TITLES)} stages")


def _paths(a: object, b: object, where: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(set(a) | set(b))
        return [p for k in keys for p in _paths(a.get(k), b.get(k), f"{where}.{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [p for i, (x, y) in enumerate(zip(a, b, strict=True)) for p in _paths(x, y, f"{where}[{i}]")]
    return [] if a == b and type(a) is type(b) else [f"{where}: {_short(a)} != {_short(b)}"]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---------------------------------------------------------------- explanation


def explain(outcome: PlanOutcome) -> str:
    """Returns the decision in one screen: source, reuse, owners, stages, price, alternatives, stop."""
    inputs, d = outcome.inputs, outcome.decision
    request = inputs.candidates[0].request
    asked = f"{request.prompt_tokens:,} prompt tokens, reserves {request.capacity_tokens[0]:,}"
    lines = [
        f"request   {asked}; {len(inputs.candidates)} candidates, revision {inputs.state.revision}",
        f"answer    {d.readiness.name}: {d.readiness.value}",
    ]
    if d.source is not None:
        lines.append(f"source    {_source_line(d.source)}")
    if d.search is not None:
        lines += _search_lines(d.search)
    lines += _owner_lines(d)
    lines += _stage_lines(inputs, d)
    lines += _price_lines(d)
    lines += _rejected_lines(inputs, d)
    return "\n".join(lines)


def _source_line(s: SourceFact) -> str:
    if s.owner < 0:
        return f"root: nothing reused, {s.prefill_tokens:,} tokens to prefill"
    how = "consumed" if s.consumed else "kept"
    return (
        f"owner {s.owner}'s {s.kind} at {s.reused_tokens:,} tokens ({how}): "
        f"{s.reused_tokens:,} reused, {s.prefill_tokens:,} to prefill"
    )


def _search_lines(s: SearchFact) -> list[str]:
    better = ""
    if s.num_improvements:
        better = f", {s.num_improvements} improvements from {_ms(s.first_price_ns)}"
    fallback = "; everything evictable goes" if s.is_fallback else ""
    granted = f" of {_ms(s.granted_ns)} granted" if s.granted_ns else ""
    stopped = f"stopped   {s.stop}: {s.stop_meaning} ({s.phase}{fallback})"
    return [
        *textwrap.wrap(stopped, LINE_WIDTH, subsequent_indent=" " * 10),
        f"effort    {s.num_targets:,} optional targets in {_ms(s.used_ns)}{granted}, "
        f"{s.renewals} extensions{better}",
    ]


def _owner_lines(d: Decision) -> list[str]:
    if d.source is None:
        return []
    if not d.owners:
        return ["owners    all stay as they are"]
    lines = []
    for fact in d.owners[:MAX_OWNER_LINES]:
        detail = f"{fact.num_dropped} of {fact.num_checkpoints} checkpoints go"
        if fact.d2h_images or fact.d2h_pages:
            detail += f", {fact.d2h_images} images and {fact.d2h_pages:,} pages copied to Host"
        if fact.device_pages_freed:
            detail += f", {fact.device_pages_freed:,} Device pages freed"
        lines.append(f"owner {fact.owner:<4}{fact.kind}: {fact.fate} ({detail})")
    rest = d.owners[MAX_OWNER_LINES:]
    if rest:
        gone = sum(f.evicted for f in rest)
        lines.append(f"          and {len(rest)} more owners, {gone} of them evicted")
    return lines


def _stage_lines(inputs: PlanInputs, d: Decision) -> list[str]:
    if not d.used:
        return []
    limit = inputs.state.capacity.units().tolist()
    lines = [f"{'stage use':<20}" + "".join(f"{t:>10}" for t in (*STAGE_TITLES, "peak", "capacity"))]
    for r, name in enumerate(axis_names(inputs.state.capacity)):
        column = [row[r] for row in d.used]
        lines.append(f"{name:<20}" + "".join(f"{x:>10,}" for x in (*column, max(column), limit[r])))
    return lines


def _price_lines(d: Decision) -> list[str]:
    p = d.price
    if p is None:
        return []
    parts = [
        ("prefill", p.prefill_ns),
        ("to Host", p.pressure_ns),
        ("restore", p.restore_ns),
        ("copies", p.copy_ns),
        ("lost public value", p.public_ns),
        *((f"lost value of owner {o}", ns) for o, ns in sorted(p.private_ns, key=lambda x: -x[1])[:3]),
    ]
    if len(p.private_ns) > 3:
        rest = sum(sorted((ns for _, ns in p.private_ns), reverse=True)[3:])
        parts.append((f"of {len(p.private_ns) - 3} more owners", rest))
    shown = " + ".join(f"{name} {_ms(ns)}" for name, ns in parts if ns)
    text = f"price     {_ms(p.total_ns)} = {shown or '0'}"
    return textwrap.wrap(text, LINE_WIDTH, subsequent_indent=" " * 10)


def _rejected_lines(inputs: PlanInputs, d: Decision) -> list[str]:
    names = axis_names(inputs.state.capacity)
    lines = []
    for a in d.rejected[:MAX_REJECTED_LINES]:
        why = a.reason
        if any(a.missing):
            why += ": " + ", ".join(f"{m:,} {n} missing" for m, n in zip(a.missing, names, strict=True) if m)
        pressure = f", {a.degraded} owners degraded" if a.degraded else ""
        where = "root" if a.source.owner < 0 else f"owner {a.source.owner} at {a.source.reused_tokens:,}"
        lines.append(f"rejected  {where}: {_ms(a.price_ns)}{pressure}; {why}")
    if len(d.rejected) > MAX_REJECTED_LINES:
        lines.append(f"          and {len(d.rejected) - MAX_REJECTED_LINES} more")
    return lines


def _ms(ns: int) -> str:
    return "unpriceable" if ns >= SATURATED else f"{ns / 1e6:,.3f} ms"
