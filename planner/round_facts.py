"""What the value of a round is made of before any placement: who has which checkpoints, prices of rebuilding
them, which demand records name them.

Owns: `CacheFacts` and `NewCheckpoint`, what the manager says, and `RoundFacts`, the same laid out by owner.
Owns no placement and no price of a target.

Letters: Q checkpoints of the problem, V victims, U owners with checkpoints, M checkpoints of one owner, O
owner rows, W demand records, L (record group, owner) pairs, G record groups, X credited owners, N pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ninfer_jax.planner.cost import SATURATED, MachineCostModel, prefill_ns_array
from ninfer_jax.planner.problem import Problem


@dataclass(frozen=True, eq=False)
class CacheFacts:
    """What the manager knows about owners and checkpoints, as arrays. Build with `make_facts`."""

    weights: np.ndarray  # int64[O], prior of private owners, 0 for shared ones
    credited: np.ndarray  # bool[O], shared owners with a live credit
    matches: np.ndarray  # bool[Q, W], demand records that name the checkpoint
    hits: np.ndarray  # int64[Q], observed selected hits
    last_hit: np.ndarray  # int64[Q], epoch of the last one


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


@dataclass(frozen=True, eq=False)
class RoundFacts:
    """Facts of one round that no placement changes. Build with `make_round_facts`."""

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
    slot: np.ndarray  # int64[L], the pair's number among its owner's
    pairs: np.ndarray  # int64[L], pairs by owner
    pair_bounds: np.ndarray  # int64[U + 2], where each owner's begin in `pairs`


def make_round_facts(
    problem: Problem, facts: CacheFacts, model: MachineCostModel, new: NewCheckpoint | None
) -> RoundFacts:
    """Returns the facts of one round."""
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
    pairs = np.argsort(record_owner, kind="stable")
    pair_bounds = np.searchsorted(record_owner[pairs], np.arange(len(owners) + 2))
    slot = np.empty(len(pairs), np.int64)
    slot[pairs] = np.arange(len(pairs)) - pair_bounds[record_owner[pairs]]
    return RoundFacts(
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
        slot,
        pairs,
        pair_bounds,
    )


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
