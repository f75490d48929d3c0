"""Everything one planning call was given, as a value that a file can hold and a replay can use again.

Owns: `PlanInputs`, the file envelope (schema version, digest), the checks of what was read, and the clock of
a replay. Owns no decision: `outcome` adds it. Reading and writing files is the caller's business.

A file holds numbers about placements only: no prompt, no token and no key (O-4).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from ninfer_jax.planner.candidate import Candidate
from ninfer_jax.planner.codec import decode, encode
from ninfer_jax.planner.cost import MachineCostModel
from ninfer_jax.planner.ids import NO_EXTENT, NO_OWNER, CheckpointKind, OwnerKind
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.portfolio import CacheFacts
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.planner.state import PhysicalState

SCHEMA_VERSION: Final = 2  # 2: pages have serials
ARTIFACT_TYPE: Final = "ninfer-jax-plan"
MAX_PAGES: Final = 1 << 22  # 268 million tokens of 64-token pages: more is damage


@dataclass(frozen=True, eq=False)
class PlanInputs:
    """One planning call's arguments; the same inputs give the same plan, bit for bit.

    Attributes:
        candidates: root first.
        vacant: private catalog cells that were free.
        publishes: whether the request wanted to publish at all.
        recency: int64[O], newest hit or publication of each owner row, -1 for none; None without G-7.
        max_options: options per owner; None takes the planner's own choice.
        readings: what the clock said, in order, counted from the first; a replay repeats them.
    """

    state: PhysicalState
    candidates: tuple[Candidate, ...]
    facts: CacheFacts
    model: MachineCostModel
    budget: Budget
    vacant: int = 1
    publishes: bool = True
    recency: np.ndarray | None = None  # int64[O]
    intent: tuple[int, ...] = ()
    max_options: int | None = None
    readings: tuple[int, ...] = ()


@dataclass(eq=False)
class ReplayClock:
    """A clock that repeats earlier readings; past the last one time stands still. Holds its position."""

    readings: Sequence[int]
    at: int = 0

    def __call__(self) -> int:
        """Returns the next reading in nanoseconds."""
        if not self.readings:
            return 0
        self.at = min(self.at + 1, len(self.readings))
        return self.readings[self.at - 1]


def write(sections: dict[str, object]) -> str:
    """Returns the text of a file: version, digest, and each section encoded."""
    body = {name: encode(value) for name, value in sections.items()}
    head = {"artifact_type": ARTIFACT_TYPE, "schema_version": SCHEMA_VERSION, "digest": _digest(body)}
    return json.dumps(head | body, separators=(",", ":")) + "\n"


def read(text: str | bytes, sections: dict[str, type]) -> dict[str, Any]:
    """Returns the decoded sections of a file.

    Args:
        sections: name and type of each section; the value is None where the file has none.
    Raises:
        ValueError: in one line, if the text is damaged, foreign, of another version, or inconsistent.
    """
    try:
        top = json.loads(text, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as e:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"plan file: not JSON, or cut off ({e})") from e
    if not isinstance(top, dict) or top.get("artifact_type") != ARTIFACT_TYPE:
        raise ValueError(f"plan file: this is no {ARTIFACT_TYPE} file; PlanOutcome.to_json() writes one")
    if top.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"plan file: version {top.get('schema_version')!r}, this program reads version {SCHEMA_VERSION}"
        )
    body = {k: v for k, v in top.items() if k not in ("artifact_type", "schema_version", "digest")}
    if set(body) != set(sections):
        raise ValueError(f"plan file: expected the sections {', '.join(sections)}; got {', '.join(body)}")
    if top.get("digest") != _digest(body):
        raise ValueError("plan file: damaged, its content does not match its digest")
    return {k: None if body[k] is None else decode(kind, body[k], k) for k, kind in sections.items()}


def check_inputs(inputs: PlanInputs) -> None:
    """Returns None if the inputs can be planned with.

    Raises:
        ValueError: naming the array or rule that is wrong.
    """
    _check_shapes(inputs.state)
    try:
        check_invariants(inputs.state)
    except (IndexError, OverflowError, MemoryError) as e:
        raise ValueError(f"inputs.state: rows refer to rows that do not exist ({e})") from e
    state, facts = inputs.state, inputs.facts
    num = int(np.count_nonzero(state.checkpoint_owner != NO_OWNER))
    demands = facts.matches.shape[1] if facts.matches.ndim == 2 else -1
    expected = {
        "weights": (np.int64, (state.num_owners,)),
        "credited": (np.bool_, (state.num_owners,)),
        "matches": (np.bool_, (num, demands)),
        "hits": (np.int64, (num,)),
        "last_hit": (np.int64, (num,)),
    }
    for name, (dtype, shape) in expected.items():
        _expect(f"inputs.facts.{name}", getattr(facts, name), dtype, shape)
    if inputs.recency is not None:
        _expect("inputs.recency", inputs.recency, np.int64, (state.num_owners,))
    if not inputs.candidates or not inputs.candidates[0].is_root:
        raise ValueError("inputs.candidates: the first candidate must be root")
    for i, candidate in enumerate(inputs.candidates):
        r = candidate.request
        if min(r.prompt_tokens, r.chunk_tokens, *r.capacity_tokens, 2**31 - 1) < 1:
            raise ValueError(f"inputs.candidates[{i}].request: token counts must be positive")
        if candidate.checkpoint is not None and not 0 <= candidate.checkpoint < len(state.checkpoint_owner):
            raise ValueError(f"inputs.candidates[{i}].checkpoint: no row {candidate.checkpoint}")


def _check_shapes(state: PhysicalState) -> None:
    """Raises ValueError unless all arrays have the shape and range that their docstrings promise."""
    n, o = state.capacity.num_pools, state.num_owners
    pools = state.capacity.pools
    if not pools or state.capacity.page_tokens < 1 or min(p.page_granules for p in pools) < 1:
        raise ValueError(
            "inputs.state.capacity: expected a pool, and pages of at least a token and a granule"
        )
    sizes = {
        "owner": o,
        "checkpoint": len(state.checkpoint_owner),
        "image": len(state.image_live),
        "run": len(state.run_pool),
        "space": len(state.space_owner),
    }
    tails = {
        "owner_reserved_pages": (n,),
        "owner_frontier": (n,),
        "owner_serial": (n,),
        "checkpoint_kv_tokens": (n,),
        "checkpoint_rebuild": (3,),
    }
    other = {
        "owner_kind": np.int8,
        "checkpoint_kind": np.int8,
        "owner_serial": np.int64,
        "run_serial": np.int64,
        "image_live": np.bool_,
        "run_device": np.bool_,
    }
    for prefix, size in sizes.items():
        for name in vars(state):
            if name.startswith(prefix + "_"):
                dtype = other.get(name, np.int32)
                _expect(f"inputs.state.{name}", getattr(state, name), dtype, (size, *tails.get(name, ())))
    _expect("inputs.state.edges", state.edges, np.bool_, (o, o))
    ranges = {
        "owner_kind": (0, max(OwnerKind)),
        "owner_reads": (-1, sizes["image"] - 1),
        "owner_writes": (-1, sizes["image"] - 1),
        "owner_lineage": (-1, o - 1),
        "owner_frontier": (0, 2**28),
        "checkpoint_owner": (-1, o - 1),
        "checkpoint_kind": (0, max(CheckpointKind)),
        "checkpoint_image": (-1, sizes["image"] - 1),
        "checkpoint_frontier": (0, 2**28),
        "checkpoint_kv_tokens": (0, 2**28),
        "run_pool": (-1, n - 1),
        "run_pages": (0, 2**24),
        "run_host_start": (NO_EXTENT, state.capacity.host_kv_granules),
        "run_writer": (-1, o - 1),
        "space_owner": (0, o - 1),
        "space_run": (0, sizes["run"] - 1),
        "space_start": (0, 2**24),
    }
    for name, (low, high) in ranges.items():
        array = getattr(state, name)
        if array.size and not (low <= array.min() and array.max() <= high):
            raise ValueError(f"inputs.state.{name}: expected {low}..{high}, got {array.min()}..{array.max()}")
    if int(state.run_pages.sum()) > MAX_PAGES:
        raise ValueError(f"inputs.state.run_pages: more than {MAX_PAGES} pages")


def _expect(where: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        wanted = f"{np.dtype(dtype).name}{list(shape)}"
        raise ValueError(f"{where}: expected {wanted}, got {array.dtype.name}{list(array.shape)}")


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _no_float(text: str) -> int:
    raise ValueError(f"{text} is no whole number")
