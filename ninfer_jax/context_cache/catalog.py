"""The private and shared cells: what is catalogued where, and which cells are promised.

Owns the catalog as a value and its pure changes. It knows summaries only; whether a checkpoint is really
there is the program's answer. A cell is vacant, holds an entry, is reserved for a request, or both of the
latter while the entry's victim or consumed owner is about to leave it (Y-5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from ninfer_jax.errors import InvariantError
from ninfer_jax.identity import Evidence
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind
from ninfer_jax.planner.portfolio import Retention
from ninfer_jax.request import RequestId
from ninfer_jax.reuse import OwnerKey, OwnerSummary

NO_EVIDENCE = Evidence(0)
HitKey: TypeAlias = tuple[CheckpointKind, int]  # kind and ordinal: what survives republication


class HitCount(NamedTuple):
    """How often a checkpoint was the chosen source of a published request, and when last."""

    num_hits: int
    last_epoch: int


class CellId(NamedTuple):
    """Names one cell; ``kind`` is PRIVATE or SHARED."""

    kind: OwnerKind
    cell_idx: int


@dataclass(frozen=True)
class Entry:
    """One catalogued owner.

    Attributes:
        session: the session it is the current binding of, or None: anonymous.
        order: publication order of the request that published it.
        published_epoch: when; with the hits this is the owner's recency (G-7).
        evidence: of a shared entry, why it was published.
    """

    summary: OwnerSummary
    retention: Retention = Retention.RECENT_PRIVATE
    session: str | None = None
    order: int = 0
    published_epoch: int = 0
    hits: Mapping[HitKey, HitCount] = field(default_factory=dict)
    evidence: Evidence = NO_EVIDENCE

    @property
    def recency(self) -> int:
        """Epoch of the newest hit, or of publication."""
        return max([self.published_epoch, *(h.last_epoch for h in self.hits.values())])


@dataclass(frozen=True)
class Cell:
    """One place of a catalog; its generation counts its entries (REV-06)."""

    generation: int = 0
    entry: Entry | None = None
    reserved_by: RequestId | None = None

    @property
    def is_vacant(self) -> bool:
        """Whether it can be reserved."""
        return self.entry is None and self.reserved_by is None


@dataclass(frozen=True)
class Catalog:
    """All cells. Build with `make_catalog`."""

    private: tuple[Cell, ...]
    shared: tuple[Cell, ...]


def make_catalog(num_private: int, num_shared: int) -> Catalog:
    """Returns an empty catalog."""
    return Catalog((Cell(),) * num_private, (Cell(),) * num_shared)


def cells(catalog: Catalog) -> Iterator[tuple[CellId, Cell]]:
    """Returns every cell, private ones first, in index order."""
    for kind, row in ((OwnerKind.PRIVATE, catalog.private), (OwnerKind.SHARED, catalog.shared)):
        for index, cell in enumerate(row):
            yield CellId(kind, index), cell


def entries(catalog: Catalog) -> Iterator[tuple[CellId, Entry]]:
    """Returns every catalogued entry, private ones first, in index order."""
    for at, cell in cells(catalog):
        if cell.entry is not None:
            yield at, cell.entry


def find(catalog: Catalog, owner: OwnerKey) -> CellId | None:
    """Returns the cell of an owner; None if that generation of the row is not catalogued."""
    for at, entry in entries(catalog):
        if entry.summary.owner_key == owner:
            return at
    return None


def cell_at(catalog: Catalog, at: CellId) -> Cell:
    """Returns one cell."""
    return (catalog.private if at.kind is OwnerKind.PRIVATE else catalog.shared)[at.cell_idx]


def entry_at(catalog: Catalog, at: CellId) -> Entry:
    """Returns the entry of an occupied cell."""
    entry = cell_at(catalog, at).entry
    if entry is None:
        raise InvariantError(f"catalog: {at.kind.name} cell {at.cell_idx} is empty, expected an entry")
    return entry


def first_vacant(catalog: Catalog, kind: OwnerKind) -> CellId | None:
    """Returns the first cell that can be reserved."""
    return next((at for at, cell in cells(catalog) if at.kind is kind and cell.is_vacant), None)


def num_vacant(catalog: Catalog, kind: OwnerKind) -> int:
    """Returns how many cells can be reserved."""
    return sum(at.kind is kind and cell.is_vacant for at, cell in cells(catalog))


def with_cell(catalog: Catalog, at: CellId, cell: Cell) -> Catalog:
    """Returns the catalog with one cell replaced."""
    row = catalog.private if at.kind is OwnerKind.PRIVATE else catalog.shared
    row = (*row[: at.cell_idx], cell, *row[at.cell_idx + 1 :])
    return replace(catalog, private=row) if at.kind is OwnerKind.PRIVATE else replace(catalog, shared=row)


def reserve(catalog: Catalog, at: CellId, request: RequestId) -> Catalog:
    """Returns the catalog with a cell promised to a request; an entry in it stays until it leaves."""
    cell = cell_at(catalog, at)
    if cell.reserved_by is not None:
        raise InvariantError(f"catalog: {at.kind.name} cell {at.cell_idx} is promised twice")
    return with_cell(catalog, at, replace(cell, reserved_by=request))


def unreserve(catalog: Catalog, at: CellId, request: RequestId) -> Catalog:
    """Returns the catalog with a promise taken back."""
    cell = cell_at(catalog, at)
    if cell.reserved_by != request:
        raise InvariantError(
            f"catalog: {at.kind.name} cell {at.cell_idx} is not promised to request {request}"
        )
    return with_cell(catalog, at, replace(cell, reserved_by=None))


def publish(catalog: Catalog, at: CellId, entry: Entry) -> Catalog:
    """Returns the catalog with a new entry in a cell, whose promise is thereby kept."""
    cell = cell_at(catalog, at)
    if cell.entry is not None:
        raise InvariantError(f"catalog: {at.kind.name} cell {at.cell_idx} is still occupied")
    return with_cell(catalog, at, Cell(cell.generation + 1, entry))


def update(catalog: Catalog, at: CellId, entry: Entry) -> Catalog:
    """Returns the catalog with the facts of a catalogued owner replaced."""
    return with_cell(catalog, at, replace(cell_at(catalog, at), entry=entry))


def remove(catalog: Catalog, at: CellId) -> Catalog:
    """Returns the catalog without the entry of a cell; a promise on the cell stays."""
    return with_cell(catalog, at, replace(cell_at(catalog, at), entry=None))


def summarised(entry: Entry, summary: OwnerSummary) -> Entry:
    """Returns an entry with its owner's newer summary; hits of checkpoints that are gone go with them."""
    kept = {(c.ref.kind, c.ref.ordinal) for c in summary.checkpoints}
    hits = {k: v for k, v in entry.hits.items() if k in kept}
    return replace(entry, summary=summary, hits=hits)
