"""One planning round: a state, the candidates of one request, and the pressure domain when it is asked for.

Owns: `Problem`, `make_problem` (design 3.1), the identity and the maximal targets. Owns neither choice nor
price.

A round begins with the candidates' sources alone. Most rounds end there: if every identity fits, nobody is
put under pressure and no option is ever enumerated (G-2). `Problem.options` and `Problem.tables` are made
together when they are first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from ninfer_jax.planner.candidate import Candidate
from ninfer_jax.planner.class_patterns import ClassTables, make_class_tables
from ninfer_jax.planner.holders import Entries, Holdings, Objects, make_holdings
from ninfer_jax.planner.identity import IdentityChange, identity_change
from ninfer_jax.planner.needs import identity_deficits, make_needs
from ninfer_jax.planner.option_sizes import make_options
from ninfer_jax.planner.options import MAX_CHECKPOINTS, OptionTable, Template, make_templates
from ninfer_jax.planner.sources import SourceView, check_candidates, source_view
from ninfer_jax.planner.state import PhysicalState
from ninfer_jax.planner.tables import Tables, make_tables
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch, make_targets


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything one planning round needs. Immutable; valid for `state.revision` only (G-12).

    The properties that are made on first use are functions of the fields alone.
    """

    holdings: Holdings
    candidates: tuple[Candidate, ...]
    source_victim: np.ndarray  # int32[D], victim row of the source, or -1
    templates: tuple[Template, ...]  # K
    views: dict[int, SourceView] = field(default_factory=dict)  # what `source` has made

    @property
    def state(self) -> PhysicalState:
        """The state that is planned on."""
        return self.holdings.state

    @property
    def victims(self) -> np.ndarray:
        """int32[V], owner row of each victim row."""
        return self.holdings.victims

    @property
    def checkpoints(self) -> np.ndarray:
        """int32[Q], every live checkpoint row."""
        return self.holdings.checkpoints

    @property
    def entries(self) -> Entries:
        """Who holds what."""
        return self.holdings.entries

    @property
    def objects(self) -> Objects:
        """Facts of every object."""
        return self.holdings.objects

    @property
    def num_victims(self) -> int:
        """V without padding."""
        return len(self.holdings.victims)

    @property
    def num_options(self) -> int:
        """K without padding."""
        return len(self.templates)

    @cached_property
    def sources(self) -> tuple[SourceView, ...]:
        """The view of every candidate's source."""
        return tuple(self.source(d) for d in range(len(self.candidates)))

    def source(self, which: int) -> SourceView:
        """Returns the view of one candidate's source, made when it is first asked for."""
        if which not in self.views:
            self.views[which] = source_view(self.holdings, self.candidates[which])
        return self.views[which]

    @cached_property
    def identity_changes(self) -> tuple[IdentityChange, ...]:
        """What the identity of every candidate does."""
        return tuple(identity_change(self.holdings, c) for c in self.candidates)

    @property
    def options(self) -> OptionTable:
        """Parameters of every option of every victim."""
        return self._pressure[0]

    @property
    def tables(self) -> Tables:
        """What every option does and every candidate needs."""
        return self._pressure[1]

    @cached_property
    def class_tables(self) -> ClassTables:
        """The masks of `tables` as counts."""
        return make_class_tables(self.tables)

    @cached_property
    def _pressure(self) -> tuple[OptionTable, Tables]:
        """Returns the one bounded pressure domain (G-2)."""
        needs = make_needs(self.holdings, self.candidates, self.sources)
        options = make_options(self.holdings, self.templates, identity_deficits(self.holdings, needs))
        tables, valid = make_tables(self.holdings, options, needs)
        return replace(options, valid=valid), tables


def make_problem(
    state: PhysicalState,
    candidates: Sequence[Candidate],
    *,
    max_options: int | None = None,
    holdings: Holdings | None = None,
) -> Problem:
    """Returns one planning round.

    Args:
        candidates: root first; each with its own request work.
        max_options: options per owner; None takes 16 for many owners and up to 64 for few.
        holdings: `make_holdings(state)`, which a caller that plans several requests on one revision makes
            once; None makes it here.
    Raises:
        ValueError: if there is no candidate, a source is not a live inactive checkpoint, a consumed source
            is protected, or the holdings belong to another state.

    >>> from ninfer_jax.planner.candidate import make_request, root_candidate
    >>> from ninfer_jax.planner.capacity import make_capacity
    >>> from ninfer_jax.planner.state import make_state
    >>> state = make_state(make_capacity(device_state_slots=2, device_pages=12))
    >>> make_problem(state, [root_candidate(make_request(100, 50))]).num_victims
    0
    """
    if not candidates:
        raise ValueError("a problem needs at least the root candidate")
    if holdings is None:
        holdings = make_holdings(state)
    elif holdings.state is not state:
        raise ValueError(
            f"got holdings of revision {holdings.state.revision} for the state of revision {state.revision}: "
            "call make_holdings(state) after every change"
        )
    counts = holdings.counts
    if counts.max(initial=0) > MAX_CHECKPOINTS:
        raise ValueError(f"an owner has {counts.max()} checkpoints, at most {MAX_CHECKPOINTS} are supported")
    check_candidates(holdings, candidates)
    if max_options is None:
        max_options = min(64, max(16, 1024 // max(len(holdings.victims), 1)))
    return Problem(
        holdings,
        tuple(candidates),
        np.asarray(
            [
                -1 if c.checkpoint is None else holdings.victim_of[state.checkpoint_owner[c.checkpoint]]
                for c in candidates
            ],
            np.int32,
        ),
        make_templates(holdings.victim_depth, max_options),
    )


def identity_targets(problem: Problem) -> TargetBatch:
    """Returns one target per candidate: activation and source disposition, nothing else (T-4)."""
    codes = np.full((len(problem.candidates), problem.num_victims), KEEP, np.int32)
    return make_targets(np.arange(len(problem.candidates)), _with_source(problem, codes))


def maximal_targets(problem: Problem) -> TargetBatch:
    """Returns one target per candidate that releases everything its domain may release (G-4 for root)."""
    codes = np.full((len(problem.candidates), problem.num_victims), EVICT, np.int32)
    return make_targets(np.arange(len(problem.candidates)), _with_source(problem, codes))


def base_tokens(problem: Problem, candidate: int) -> int:
    """Returns the prompt tokens that the candidate reuses."""
    checkpoint = problem.candidates[candidate].checkpoint
    return 0 if checkpoint is None else int(problem.state.checkpoint_frontier[checkpoint])


def _with_source(problem: Problem, codes: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(problem.source_victim >= 0)
    codes[rows, problem.source_victim[rows]] = ABSENT
    return codes
