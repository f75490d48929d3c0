"""What becomes of a source: kept beside the new branch, or consumed by it (N-9).

Owns that one rule as a truth table over logical facts. Move or Fork is the program's conclusion (R-9).

    ==============================================  =========================================
    source                                          disposition
    ==============================================  =========================================
    shared prefix, or an owner others read          Retain
    the request publishes nothing                   Retain
    the request marks that very frontier            Retain
    bound to a session the request may not rewrite  Retain
    long anchor, a private cell is vacant           Retain if that fits as it is, else Consume
    anything else                                   Consume
    ==============================================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from ninfer_jax.context_cache.request_facts import RequestFacts, explicit_frontiers
from ninfer_jax.context_cache.shortlist import Hit
from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.ids import CheckpointKind
from ninfer_jax.reuse import ROOT_CHOICE, SourceChoice


class SourceRule(Enum):
    """What the table says about one source."""

    RETAIN = "retain"
    CONSUME = "consume"
    RETAIN_IF_FITS = "retain if the branch fits beside the conversation as the cache stands"


def source_rule(facts: RequestFacts, hit: Hit, *, is_protected: bool, has_vacant_cell: bool) -> SourceRule:
    """Returns the table's row for one verified source.

    Args:
        is_protected: an active request or the open transition holds its owner.
        has_vacant_cell: the private catalog has room for a second branch.
    """
    session = hit.entry.session
    is_foreign = session is not None and session != facts.binds_session
    if hit.is_shared or is_protected or is_foreign or not facts.participates:
        return SourceRule.RETAIN
    if hit.checkpoint.frontier_tokens in explicit_frontiers(facts):
        return SourceRule.RETAIN
    if hit.checkpoint.ref.kind is CheckpointKind.LONG_ANCHOR and has_vacant_cell:
        return SourceRule.RETAIN_IF_FITS
    return SourceRule.CONSUME


def source_choices(
    facts: RequestFacts, hits: Sequence[Hit], rules: Sequence[SourceRule], retains: Callable[[int], bool]
) -> tuple[SourceChoice, ...]:
    """Returns the candidates: root, then one per hit; the same checkpoint is never listed twice (N-1).

    Args:
        retains: of the position of an undecided source among the choices, whether it is to be retained.
    """
    choices = [ROOT_CHOICE]
    for at, (hit, rule) in enumerate(zip(hits, rules, strict=True), start=1):
        keep = rule is SourceRule.RETAIN or (rule is SourceRule.RETAIN_IF_FITS and retains(at))
        session = facts.hints.session
        choices.append(
            SourceChoice(
                hit.checkpoint.ref,
                Disposition.RETAIN if keep else Disposition.CONSUME,
                session is not None and hit.entry.session == session,
            )
        )
    return tuple(choices)
