"""What work costs in predicted nanoseconds: the machine model, its fixed-point arithmetic, its presets.

Owns: coefficients, prices of transfers and prefill, preset files as text, the layered choice of a model. Owns
no decision: a price orders feasible targets and never makes one feasible (O-1). Reading a file and measuring
a machine happen outside of planner/.

Rates are unsigned 32.32 fixed point (`*_q32`), every product rounds up, and every sum and product saturates
at SATURATED (O-13). A saturated price equals any other one, so it never proves a gain.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final

import numpy as np
from ninfer_jax.planner.work import Direction, PrefillWork, TransferWork, Work, coalesce

SATURATED: Final = 2**63 - 1
Q32: Final = 2**32
SCHEMA_VERSION: Final = 1
ARTIFACT_TYPE: Final = "ninfer-jax-context-cost-presets"

EXACT_FLOAT: Final = float(2**62)  # below this a float64 sum proves that the int64 sum did not overflow


# ---------------------------------------------------------------- arithmetic


def saturate(value: int) -> int:
    """Returns the value cut at SATURATED."""
    return min(value, SATURATED)


def scale(rate_q32: int, amount: int) -> int:
    """Returns ``rate * amount`` in nanoseconds, rounded up, saturated.

    >>> scale(Q32 // 2, 3)
    2
    """
    return saturate(-(-rate_q32 * amount // Q32))


def saturating_sum(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    """Returns int64 ``a + b`` cut at SATURATED; both non-negative."""
    if _largest(a) + _largest(b) < EXACT_FLOAT:
        return a + b
    return a + np.minimum(b, SATURATED - a)


def saturating_product(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    """Returns int64 ``a * b`` cut at SATURATED; both non-negative."""
    if _largest(a) * _largest(b) < EXACT_FLOAT:
        return np.multiply(a, b, dtype=np.int64)
    bound = SATURATED // np.maximum(b, 1)
    return np.where(a > bound, SATURATED, np.multiply(np.minimum(a, bound), b, dtype=np.int64))


def _largest(a: np.ndarray | int) -> float:
    return float(a.max(initial=0)) if isinstance(a, np.ndarray) else float(a)


def saturating_total(a: np.ndarray, axis: int) -> np.ndarray:
    """Returns int64 sums over `axis`, cut at SATURATED; entries non-negative."""
    if a.shape[axis] == 0 or float(a.max(initial=0)) * a.shape[axis] < EXACT_FLOAT:
        return a.sum(axis, dtype=np.int64)
    exact = np.asarray(a.astype(object).sum(axis), object)  # 0-d for a vector
    return np.asarray([min(int(x), SATURATED) for x in exact.ravel()], np.int64).reshape(exact.shape)


def scale_array(rate_q32: int, amount: np.ndarray) -> np.ndarray:
    """Returns `scale` of every element of an int64 array."""
    whole, part = divmod(rate_q32, Q32)
    if (whole + 1.0) * float(amount.max(initial=0)) >= EXACT_FLOAT:
        flat = [scale(rate_q32, int(a)) for a in amount.ravel()]
        return np.asarray(flat, np.int64).reshape(amount.shape)
    largest = int(amount.max(initial=0))
    if largest * part < 2**62:
        below_one = (amount * part + (Q32 - 1)) >> 32
    else:
        low = (amount & (Q32 - 1)).astype(np.uint64) * np.uint64(part)  # below 2**64
        carry = (low >> np.uint64(32)) + ((low & np.uint64(Q32 - 1)) != 0)
        below_one = (amount >> 32) * part + carry.astype(np.int64)
    return amount * whole + below_one if whole else below_one


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class TransferCoefficients:
    """One direction: a batch costs ``max(batch_ns + operations * operation_ns, bytes * rate)`` (O-2)."""

    batch_ns: int
    operation_ns: int
    byte_q32: int


@dataclass(frozen=True)
class TransferModel:
    """Copies in the three directions."""

    d2h: TransferCoefficients
    h2d: TransferCoefficients
    d2d: TransferCoefficients

    def of(self, direction: Direction) -> TransferCoefficients:
        """Returns the coefficients of one direction."""
        return (self.d2h, self.h2d, self.d2d)[direction]


@dataclass(frozen=True)
class PrefillModel:
    """Model work: one price per chunk, token, attention pair, vision item and vision patch."""

    chunk_ns: int
    token_q32: int
    pair_q32: int
    vision_item_ns: int
    patch_q32: int


class CostSource(Enum):
    """Where a set of coefficients came from."""

    GENERIC_DEFAULT = "generic default"
    COMPILED_DEFAULT = "compiled default"
    EXTERNAL = "external preset"


@dataclass(frozen=True)
class MachineCostModel:
    """Prices of one machine running one model. Build with `resolve_cost_model`.

    >>> from ninfer_jax.planner.work import Phase
    >>> model = resolve_cost_model(platform="gpu")
    >>> transfer_ns(model, [TransferWork(Phase.CANDIDATE, Direction.D2D, 1, 0)])
    37000
    """

    transfer: TransferModel
    prefill: PrefillModel
    transfer_source: CostSource = CostSource.GENERIC_DEFAULT
    prefill_source: CostSource = CostSource.GENERIC_DEFAULT


# ---------------------------------------------------------------- prices


def batch_ns(coefficients: TransferCoefficients, operations: int, num_bytes: int) -> int:
    """Returns the price of one coalesced batch; nothing costs 0."""
    if not operations and not num_bytes:
        return 0
    by_count = coefficients.batch_ns + saturate(coefficients.operation_ns * operations)
    return saturate(max(by_count, scale(coefficients.byte_q32, num_bytes)))


def batch_ns_array(
    coefficients: TransferCoefficients, operations: np.ndarray, num_bytes: np.ndarray
) -> np.ndarray:
    """Returns `batch_ns` of every element; int64 arrays of one shape."""
    by_count = saturating_product(operations, coefficients.operation_ns)
    by_count = saturating_sum(by_count, saturate(coefficients.batch_ns))
    price = np.maximum(by_count, scale_array(coefficients.byte_q32, num_bytes))
    return np.where((operations == 0) & (num_bytes == 0), 0, price)


def transfer_ns(model: MachineCostModel, transfers: Iterable[TransferWork]) -> int:
    """Returns the price of copies: one phase and direction is one batch, batches are serial and add (O-2)."""
    batches = coalesce(transfers)
    return saturate(sum(batch_ns(model.transfer.of(t.direction), t.operations, t.num_bytes) for t in batches))


def prefill_ns(model: MachineCostModel, work: PrefillWork) -> int:
    """Returns the price of model work."""
    p = model.prefill
    return saturate(
        saturate(p.chunk_ns * work.chunks)
        + scale(p.token_q32, work.tokens)
        + scale(p.pair_q32, work.pairs)
        + saturate(p.vision_item_ns * work.vision_items)
        + scale(p.patch_q32, work.vision_patches)
    )


def prefill_ns_array(
    model: MachineCostModel,
    chunks: np.ndarray,
    tokens: np.ndarray,
    pairs: np.ndarray,
    vision_items: np.ndarray,
    vision_patches: np.ndarray,
) -> np.ndarray:
    """Returns `prefill_ns` of every element; int64 arrays of one shape."""
    p = model.prefill
    total = saturating_product(chunks, p.chunk_ns)
    total = saturating_sum(total, scale_array(p.token_q32, tokens))
    total = saturating_sum(total, scale_array(p.pair_q32, pairs))
    if vision_items.any() or vision_patches.any():
        total = saturating_sum(total, saturating_product(vision_items, p.vision_item_ns))
        total = saturating_sum(total, scale_array(p.patch_q32, vision_patches))
    return total


def work_ns(model: MachineCostModel, work: Work) -> int:
    """Returns the price of transfers and prefill together (Immediate, O-2)."""
    return saturate(transfer_ns(model, work.transfers) + prefill_ns(model, work.prefill))


# ---------------------------------------------------------------- default coefficients


def _transfer(*rows: tuple[int, int, int]) -> TransferModel:
    return TransferModel(*(TransferCoefficients(*row) for row in rows))


GENERIC_GPU: Final = MachineCostModel(
    _transfer((100_000, 12_000, 107_374_182), (50_000, 12_000, 107_374_182), (25_000, 12_000, 42_949_673)),
    PrefillModel(40_813_570, 1_012_273_154_411_951, 30_497_396_515, 5_986_585, 23_710_212_854_694),
)

# Copies inside host memory at about 5 GB/s; a model of a few million parameters at about 5,000 tokens/s.
GENERIC_CPU: Final = MachineCostModel(
    _transfer((20_000, 10_000, 858_993_459), (20_000, 10_000, 858_993_459), (10_000, 5_000, 429_496_730)),
    PrefillModel(2_000_000, 200_000 * Q32, 200 * Q32, 2_000_000, 200_000 * Q32),
)

COMPILED_TRANSFERS: Final[Mapping[str, TransferModel]] = {
    "nvidia-geforce-rtx-5090-sm120": _transfer(
        (48_655, 7_433, 91_692_315), (0, 8_457, 83_354_284), (3_343, 9_520, 2_658_314)
    ),
    "nvidia-geforce-rtx-3090-sm86": _transfer(
        (54_593, 6_305, 185_859_373), (48_436, 6_878, 172_624_952), (338, 6_742, 10_830_495)
    ),
}


def hardware_class(device_name: str, compute_capability: str | None = None) -> str:
    """Returns the key by which transfer coefficients are found.

    >>> hardware_class("NVIDIA GeForce RTX 5090", "12.0")
    'nvidia-geforce-rtx-5090-sm120'
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    if compute_capability is None:
        return "-".join(words)
    if words[:1] != ["nvidia"]:
        words.insert(0, "nvidia")
    return "-".join([*words, "sm" + compute_capability.replace(".", "")])


def prefill_signature(facts: Mapping[str, Any]) -> str:
    """Returns a stable digest of what the prefill speed depends on.

    Args:
        facts: text and vision config, binding structure and use; no checkpoint name and no weight (O-3).
            JSON values only.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---------------------------------------------------------------- presets


@dataclass(frozen=True)
class MachinePreset:
    """What one preset file knows about one hardware class; either half may be missing."""

    hardware_class: str
    transfer: TransferModel | None
    prefill: tuple[tuple[str, PrefillModel], ...]  # (prefill signature, coefficients)


@dataclass(frozen=True)
class CostPresets:
    """A validated preset file."""

    machines: tuple[MachinePreset, ...]


def resolve_cost_model(
    *,
    platform: str,
    hardware: str | None = None,
    signature: str | None = None,
    presets: CostPresets | None = None,
) -> MachineCostModel:
    """Returns the model of a machine: generic, replaced by a compiled match, replaced by an external one.

    Transfer and prefill are looked up independently (O-3). Nothing matching is never an error.

    Args:
        platform: "cpu" picks the generic CPU set, anything else the generic GPU one.
        hardware: `hardware_class` of the device.
        signature: `prefill_signature` of the model.
    """
    generic = GENERIC_CPU if platform == "cpu" else GENERIC_GPU
    transfer, transfer_source = generic.transfer, CostSource.GENERIC_DEFAULT
    prefill, prefill_source = generic.prefill, CostSource.GENERIC_DEFAULT
    if hardware in COMPILED_TRANSFERS:
        transfer, transfer_source = COMPILED_TRANSFERS[hardware], CostSource.COMPILED_DEFAULT
    for machine in presets.machines if presets else ():
        if machine.hardware_class != hardware:
            continue
        if machine.transfer is not None:
            transfer, transfer_source = machine.transfer, CostSource.EXTERNAL
        for known, model in machine.prefill:
            if known == signature:
                prefill, prefill_source = model, CostSource.EXTERNAL
    return MachineCostModel(transfer, prefill, transfer_source, prefill_source)


def parse_presets(source: str | Mapping[str, Any]) -> CostPresets:
    """Returns the presets of a file's text (or its decoded JSON).

    Raises:
        ValueError: naming the member: unknown or missing ones, negative, fractional or all-zero
            coefficients, duplicates, a machine that says nothing.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except json.JSONDecodeError as e:
            raise ValueError(f"cost presets: not JSON ({e})") from e
    top = _members(source, "cost presets", ("schema_version", "artifact_type", "machines"), ("provenance",))
    if top["schema_version"] != SCHEMA_VERSION or top["artifact_type"] != ARTIFACT_TYPE:
        raise ValueError(
            f"cost presets: expected {ARTIFACT_TYPE} of version {SCHEMA_VERSION}, got "
            f"{top['artifact_type']!r} of version {top['schema_version']!r}; run tools/calibrate_costs.py"
        )
    machines = tuple(_parse_machine(m, f"machines[{i}]") for i, m in enumerate(_list(top, "machines")))
    _unique([m.hardware_class for m in machines], "machines: hardware_class")
    return CostPresets(machines)


def presets_text(presets: CostPresets, *, provenance: Mapping[str, Any] | None = None) -> str:
    """Returns the JSON text of a preset file; `parse_presets` reads it back."""
    machines = []
    for m in presets.machines:
        entry: dict[str, Any] = {"hardware_class": m.hardware_class}
        if m.transfer is not None:
            entry["transfer"] = {d.name.lower(): _numbers(m.transfer.of(d)) for d in Direction}
        entry["prefill"] = [{"prefill_signature": s, **_numbers(p)} for s, p in m.prefill]
        machines.append(entry)
    top = {"schema_version": SCHEMA_VERSION, "artifact_type": ARTIFACT_TYPE, "machines": machines}
    return json.dumps(top | ({"provenance": dict(provenance)} if provenance else {}), indent=2) + "\n"


def _numbers(coefficients: TransferCoefficients | PrefillModel) -> dict[str, int]:
    return {f.name: getattr(coefficients, f.name) for f in fields(coefficients)}


def _parse_machine(source: object, where: str) -> MachinePreset:
    entry = _members(source, where, ("hardware_class",), ("transfer", "prefill", "provenance"))
    name = entry["hardware_class"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.hardware_class: expected a non-empty string, got {name!r}")
    transfer = None
    if "transfer" in entry:
        names = tuple(d.name.lower() for d in Direction)
        given = _members(entry["transfer"], f"{where}.transfer", names)
        transfer = TransferModel(
            *(TransferCoefficients(**_coefficients(given[n], f"{where}.transfer.{n}")) for n in names)
        )
        if not any(any(_numbers(transfer.of(d)).values()) for d in Direction):
            raise ValueError(f"{where}.transfer: all coefficients are zero")
    prefill = []
    for i, item in enumerate(_list(entry, "prefill", where)):
        at = f"{where}.prefill[{i}]"
        given = _members(item, at, ("prefill_signature", *(f.name for f in fields(PrefillModel))))
        signature = given.pop("prefill_signature")
        if not isinstance(signature, str) or not signature:
            raise ValueError(f"{at}.prefill_signature: expected a non-empty string, got {signature!r}")
        numbers = _whole(given, at)
        if not any(numbers.values()):
            raise ValueError(f"{at}: all coefficients are zero")
        prefill.append((signature, PrefillModel(**numbers)))
    _unique([s for s, _ in prefill], f"{where}.prefill: prefill_signature")
    if transfer is None and not prefill:
        raise ValueError(f"{where}: neither transfer nor prefill coefficients for {name!r}")
    return MachinePreset(name, transfer, tuple(prefill))


def _members(
    source: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(source, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(source).__name__}")
    unknown = sorted(set(source) - {*required, *optional})
    missing = [name for name in required if name not in source]
    if unknown or missing:
        raise ValueError(f"{where}: unknown members {unknown}, missing members {missing}")
    return dict(source)


def _list(entry: Mapping[str, Any], name: str, where: str = "cost presets") -> list[Any]:
    value = entry.get(name, [])
    if not isinstance(value, list):
        raise ValueError(f"{where}.{name}: expected a list, got {type(value).__name__}")
    return value


def _coefficients(source: object, where: str) -> dict[str, int]:
    return _whole(_members(source, where, tuple(f.name for f in fields(TransferCoefficients))), where)


def _whole(given: Mapping[str, Any], where: str) -> dict[str, int]:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= SATURATED:
            raise ValueError(f"{where}.{name}: expected an integer in 0..2**63-1, got {value!r}")
    return dict(given)


def _unique(names: list[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name!r} appears {names.count(name)} times")
