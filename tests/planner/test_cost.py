"""Prices: the worked numbers of the transfer and prefill formulas, saturation, presets and their layering."""

import doctest
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.planner import cost
from ninfer_jax.planner.cost import (
    GENERIC_CPU,
    GENERIC_GPU,
    Q32,
    SATURATED,
    CostPresets,
    CostSource,
    MachineCostModel,
    MachinePreset,
    PrefillModel,
    TransferCoefficients,
    TransferModel,
    batch_ns,
    batch_ns_array,
    parse_presets,
    prefill_ns,
    presets_text,
    resolve_cost_model,
    saturating_product,
    saturating_sum,
    saturating_total,
    scale,
    scale_array,
    transfer_ns,
    work_ns,
)
from ninfer_jax.planner.work import (
    Direction,
    Phase,
    PrefillWork,
    TransferWork,
    VisionItem,
    Work,
    attention_pairs,
    prefill_work,
)

SMALL = TransferCoefficients(10, 3, Q32 // 2)
MODEL = MachineCostModel(TransferModel(SMALL, SMALL, SMALL), PrefillModel(3, Q32 // 2, Q32 // 4, 5, 2 * Q32))


def copy(num_bytes, ops, phase=Phase.CANDIDATE, direction=Direction.H2D):
    return TransferWork(phase, direction, ops, num_bytes)


def test_val_17_transfer_price():  # O-2
    assert transfer_ns(MODEL, [copy(4, 2)]) == 16
    assert transfer_ns(MODEL, [copy(100, 1)]) == 50
    assert transfer_ns(MODEL, []) == 0
    assert transfer_ns(MODEL, [copy(0, 0)]) == 0
    assert transfer_ns(MODEL, [copy(4, 1), copy(4, 1)]) == 16
    assert transfer_ns(MODEL, [copy(4, 1), copy(4, 1, direction=Direction.D2D)]) == 26
    assert transfer_ns(MODEL, [copy(4, 1), copy(4, 1, phase=Phase.PRESSURE)]) == 26


def test_val_18_attention_pairs_and_prefill_price():  # O-2
    assert attention_pairs(100, 10) == 1000 + 55
    vision = [VisionItem(105, 3), VisionItem(110, 4)]
    work = prefill_work(100, 110, chunk_tokens=8, vision=vision)
    assert work == PrefillWork(2, 10, 1055, 2, 7)
    # chunk 2 * 3, token 5, pair ceil(1055 / 4) = 264, items 2 * 5, patches 7 * 2
    assert prefill_ns(MODEL, work) == 6 + 5 + 264 + 10 + 14 == 299
    assert work_ns(MODEL, Work((copy(100, 1),), work)) == 349


def test_a_split_costs_exactly_its_extra_chunks():  # CAND-19
    whole = prefill_work(0, 100, chunk_tokens=64)
    split = prefill_work(0, 100, chunk_tokens=64, frontiers=[32, 96])
    assert (whole.chunks, split.chunks) == (2, 3)
    assert prefill_ns(MODEL, split) - prefill_ns(MODEL, whole) == 3


def test_a_vision_item_counts_only_when_wholly_inside():
    vision = [VisionItem(50, 8)]
    assert prefill_work(0, 49, chunk_tokens=64, vision=vision).vision_items == 0
    assert prefill_work(0, 50, chunk_tokens=64, vision=vision).vision_patches == 8
    assert prefill_work(50, 60, chunk_tokens=64, vision=vision).vision_items == 0


def test_products_round_up_and_saturate():  # O-13
    assert scale(1, 1) == 1
    assert scale(Q32, SATURATED) == SATURATED
    assert scale(Q32 + 1, SATURATED) == SATURATED
    huge = TransferCoefficients(SATURATED, SATURATED, SATURATED)
    assert batch_ns(huge, 2, 0) == SATURATED
    endless = MachineCostModel(TransferModel(huge, huge, huge), MODEL.prefill)
    assert transfer_ns(endless, [copy(1, 1), copy(1, 1, Phase.PRESSURE)]) == SATURATED


@given(
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**36),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**44)), min_size=1, max_size=8),
)
def test_arrays_price_like_scalars(batch, operation, rate, rows):
    c = TransferCoefficients(batch, operation, rate)
    ops, size = (np.asarray(x, np.int64) for x in zip(*rows, strict=True))
    assert batch_ns_array(c, ops, size).tolist() == [batch_ns(c, o, b) for o, b in rows]


@given(st.integers(0, SATURATED), st.lists(st.integers(0, SATURATED), min_size=1, max_size=6))
def test_array_arithmetic_saturates_like_python(rate, numbers):
    a = np.asarray(numbers, np.int64)
    assert scale_array(rate, a).tolist() == [scale(rate, n) for n in numbers]
    assert saturating_sum(a, rate).tolist() == [min(n + rate, SATURATED) for n in numbers]
    assert saturating_product(a, 16).tolist() == [min(n * 16, SATURATED) for n in numbers]
    assert saturating_product(a, a[::-1]).tolist() == [
        min(n * m, SATURATED) for n, m in zip(numbers, numbers[::-1], strict=True)
    ]
    assert int(saturating_total(a, 0)) == min(sum(numbers), SATURATED)


# ---------------------------------------------------------------- presets


def preset(transfer=None, prefill=()):
    return CostPresets((MachinePreset("box-1", transfer, tuple(prefill)),))


def test_val_20_transfer_and_prefill_resolve_independently():  # O-3
    mine = TransferModel(SMALL, SMALL, SMALL)
    only_transfer = resolve_cost_model(
        platform="gpu", hardware="box-1", signature="?", presets=preset(mine, [("s", MODEL.prefill)])
    )
    assert (only_transfer.transfer, only_transfer.transfer_source) == (mine, CostSource.EXTERNAL)
    assert only_transfer.prefill == GENERIC_GPU.prefill
    assert only_transfer.prefill_source == CostSource.GENERIC_DEFAULT
    only_prefill = resolve_cost_model(
        platform="gpu", hardware="box-1", signature="s", presets=preset(None, [("s", MODEL.prefill)])
    )
    assert (only_prefill.prefill, only_prefill.prefill_source) == (MODEL.prefill, CostSource.EXTERNAL)
    assert only_prefill.transfer == GENERIC_GPU.transfer


def test_layers_generic_then_compiled_then_external():
    known = "nvidia-geforce-rtx-5090-sm120"
    assert resolve_cost_model(platform="cpu").transfer == GENERIC_CPU.transfer
    compiled = resolve_cost_model(platform="gpu", hardware=known)
    assert compiled.transfer_source == CostSource.COMPILED_DEFAULT
    assert compiled.transfer.h2d == TransferCoefficients(0, 8457, 83354284)
    mine = TransferModel(SMALL, SMALL, SMALL)
    over = CostPresets((MachinePreset(known, mine, ()),))
    assert resolve_cost_model(platform="gpu", hardware=known, presets=over).transfer == mine


def test_generic_numbers_as_stored():
    c = GENERIC_GPU.transfer
    assert (c.d2h.batch_ns, c.d2h.operation_ns, c.d2h.byte_q32) == (100000, 12000, 107374182)
    assert (c.d2d.batch_ns, c.d2d.operation_ns, c.d2d.byte_q32) == (25000, 12000, 42949673)
    assert GENERIC_GPU.prefill.token_q32 == 1012273154411951


def good():
    text = presets_text(preset(TransferModel(SMALL, SMALL, SMALL), [("s", MODEL.prefill)]))
    return json.loads(text)


def test_presets_survive_a_round_trip():
    wanted = preset(TransferModel(SMALL, SMALL, SMALL), [("s", MODEL.prefill)])
    assert parse_presets(presets_text(wanted, provenance={"tool": "test"})) == wanted
    assert parse_presets(good()) == wanted


def change(path, value):
    top = good()
    at = top
    for step in path[:-1]:
        at = at[step]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return top


M = ["machines", 0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema_version"], 2, "version 2"),
        (["artifact_type"], "other", "'other'"),
        (["surprise"], 1, r"unknown members \['surprise'\]"),
        ([*M, "surprise"], 1, r"machines\[0\]: unknown members"),
        ([*M, "transfer", "d2h", "byte_q32"], -1, r"transfer.d2h.byte_q32: expected an integer .* got -1"),
        ([*M, "transfer", "d2h", "byte_q32"], 0.5, "got 0.5"),
        ([*M, "transfer", "d2h", "byte_q32"], True, "got True"),
        ([*M, "transfer", "d2h", "byte_q32"], KeyError, r"missing members \['byte_q32'\]"),
        ([*M, "transfer", "h2d"], KeyError, r"missing members \['h2d'\]"),
        ([*M, "prefill", 0, "prefill_signature"], "", "non-empty string"),
        ([*M, "prefill"], {}, "expected a list"),
        ([*M, "hardware_class"], 7, "hardware_class: expected"),
        (["machines"], ["x"], "expected an object"),
    ],
)
def test_bad_presets_name_the_member(path, value, message):
    with pytest.raises(ValueError, match=message):
        parse_presets(change(path, value))


def test_empty_zero_and_duplicate_machines_are_refused():
    top = good()
    top["machines"].append(top["machines"][0])
    with pytest.raises(ValueError, match="'box-1' appears 2 times"):
        parse_presets(top)
    with pytest.raises(ValueError, match="neither transfer nor prefill"):
        parse_presets(change([*M], {"hardware_class": "x"}))
    zero = change([*M, "prefill", 0], {**good()["machines"][0]["prefill"][0]})
    for name in ("chunk_ns", "token_q32", "pair_q32", "vision_item_ns", "patch_q32"):
        zero["machines"][0]["prefill"][0][name] = 0
    with pytest.raises(ValueError, match="all coefficients are zero"):
        parse_presets(zero)
    with pytest.raises(ValueError, match="not JSON"):
        parse_presets("{")


def test_signature_depends_on_facts_only():
    a = cost.prefill_signature({"layers": 4, "use": "text"})
    assert a == cost.prefill_signature({"use": "text", "layers": 4})
    assert a != cost.prefill_signature({"use": "text", "layers": 5})


def test_doctests():
    assert doctest.testmod(cost).failed == 0
