"""Options: defaults, bounds, and messages that name field, value and bound (F-1..F-4)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ninfer_jax.errors import OptionError
from ninfer_jax.options import ContextCacheOptions, EngineOptions, make_engine_options, resolve


def resolved(platform="cpu", model_max_context=None, **changes):
    return resolve(make_engine_options(**changes), platform=platform, model_max_context=model_max_context)


@pytest.mark.smoke
def test_defaults_are_those_of_the_design():
    # design 6, "defaults"
    on_cpu, on_gpu = resolved(), resolved(platform="gpu")
    assert (on_cpu.max_context, on_cpu.prefill_chunk, on_cpu.max_concurrency) == (8192, 1024, 4)
    assert (on_cpu.max_pending_requests, on_cpu.pending_timeout_s, on_cpu.kv_capacity) == (16, 600.0, "auto")
    assert (on_cpu.dtype, on_gpu.dtype) == ("float32", "bfloat16")
    cache = on_cpu.cache
    assert (cache.device_state_slots, cache.host_state_slots, cache.max_private_continuations) == (4, 8, 8)
    assert (cache.max_shared_prefixes, cache.max_long_anchors_per_continuation) == (7, 2)
    assert (cache.host_kv_capacity_bytes, on_gpu.cache.host_kv_capacity_bytes) == (2**30, 8 * 2**30)
    assert (cache.endpoint_anchors, cache.recency_eviction, cache.kv_lease_growth) == (True, False, False)
    assert resolved(max_concurrency=8).cache.max_private_continuations == 16
    assert resolved(max_concurrency=1).cache.max_private_continuations == 8


def test_cfg_01_concurrency_range():
    # CFG-01, P-1
    for got in (0, 9):
        with pytest.raises(OptionError, match=rf"max_concurrency: got {got}, expected 1\.\.8"):
            resolved(max_concurrency=got)
    assert resolved(max_concurrency=8).max_concurrency == 8


def test_cfg_02_private_capacity_covers_active():
    # CFG-02, F-3
    with pytest.raises(
        OptionError, match=r"max_private_continuations: got 3, expected at least max_concurrency = 4"
    ):
        resolved(max_concurrency=4, max_private_continuations=3)
    assert resolved(max_concurrency=4, max_private_continuations=4).cache.max_private_continuations == 4


def test_cfg_03_default_shared_capacity():
    # CFG-03, N-10
    assert [resolved(max_concurrency=c).cache.max_shared_prefixes for c in (1, 4, 8)] == [7, 7, 8]
    assert resolved(max_concurrency=4, max_shared_prefixes=1).cache.max_shared_prefixes == 1
    assert resolved(max_concurrency=4, max_shared_prefixes=0).cache.max_shared_prefixes == 0


def test_cfg_04_state_capacity():
    # CFG-04, S-1
    assert resolved(max_concurrency=2, device_state_slots=3).total_device_state_slots == 5


@pytest.mark.smoke
def test_cfg_06_disabled_cache_is_root_only():
    # CFG-06, F-4: every optional capacity is zero, the active side is unchanged
    options = resolved(max_concurrency=2, cache=ContextCacheOptions(enabled=False, recency_eviction=True))
    assert options.cache == dataclasses.replace(
        options.cache,
        enabled=False,
        device_state_slots=0,
        host_state_slots=0,
        host_kv_capacity_bytes=0,
        max_private_continuations=2,
        max_shared_prefixes=0,
        max_long_anchors_per_continuation=0,
        endpoint_anchors=False,
        recency_eviction=False,
        kv_lease_growth=False,
    )
    assert options.total_device_state_slots == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_shared_prefixes", 4),
        ("device_state_slots", 1),
        ("host_state_slots", 8),
        ("host_kv_capacity_bytes", 1024),
        ("max_long_anchors_per_continuation", 2),
        ("max_private_continuations", 5),
    ],
)
def test_cfg_07_contradictions_with_the_cache_off(name, value):
    # CFG-07
    with pytest.raises(
        OptionError, match=rf"cache\.{name}: got {value}, expected .* while cache.enabled is False"
    ):
        resolved(cache={"enabled": False}, **{name: value})


def test_the_same_values_spelt_out_are_no_contradiction():
    zeros = dict.fromkeys(("max_shared_prefixes", "device_state_slots", "host_state_slots"), 0)
    assert (
        resolved(
            cache={"enabled": False}, max_concurrency=3, max_private_continuations=3, **zeros
        ).cache.enabled
        is False
    )


def test_kv_capacity_follows_k_9():
    # K-9: K >= max_context and a page for each lane; how many pages follow is the program's to say
    assert resolved(max_context=1000, kv_capacity=1500, max_concurrency=3).kv_capacity == 1500
    assert resolved(kv_capacity=None).kv_capacity == "auto"
    with pytest.raises(
        OptionError, match=r"kv_capacity: got 999 tokens, expected at least max_context = 1000"
    ):
        resolved(max_context=1000, kv_capacity=999)
    with pytest.raises(OptionError, match=r"kv_capacity: got 100 tokens.*max_concurrency = 4"):
        resolved(max_context=100, kv_capacity=100)
    with pytest.raises(OptionError, match=r"kv_capacity: got 'lots', expected a number of tokens or 'auto'"):
        resolved(kv_capacity="lots")


def test_the_context_obeys_the_model():
    assert resolved(model_max_context=2048).max_context == 2048
    assert resolved(model_max_context=262144).max_context == 8192
    assert resolved(max_context=16384, model_max_context=262144).max_context == 16384
    with pytest.raises(
        OptionError, match=r"max_context: got 4096, expected at most 2048, the model's own limit"
    ):
        resolved(max_context=4096, model_max_context=2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 1}, r"max_context: got 1, expected 2\.\.2147483647"),
        ({"max_context": 2**31}, r"max_context: got 2147483648"),
        ({"max_context": 12.5}, r"max_context: got 12\.5, expected an integer"),
        ({"max_concurrency": True}, r"max_concurrency: got True, expected an integer"),
        ({"max_pending_requests": 0}, r"max_pending_requests: got 0"),
        ({"pending_timeout_s": 0}, r"pending_timeout_s: got 0, expected seconds above 0"),
        ({"pending_timeout_s": float("nan")}, r"pending_timeout_s: got nan"),
        ({"pending_timeout_s": float("inf")}, r"pending_timeout_s: got inf"),
        ({"pending_timeout_s": "soon"}, r"pending_timeout_s: got 'soon'"),
        ({"prefill_chunk": 0}, r"prefill_chunk: got 0"),
        ({"dtype": "int8"}, r"dtype: got 'int8', expected one of 'float32', 'bfloat16'"),
        ({"load_format": "gguf"}, r"load_format: got 'gguf'"),
        ({"device": ""}, r"device: got ''"),
        ({"seed": -1}, r"seed: got -1"),
        (
            {"device_state_slots": 2**31 - 4},
            r"cache\.device_state_slots: got 2147483644, expected 0\.\.2147483643",
        ),
        ({"host_kv_capacity_bytes": 2**63}, r"cache\.host_kv_capacity_bytes: got 9223372036854775808"),
        ({"max_private_continuations": 2**31 - 1}, r"max_private_continuations: got 2147483647; .* entries"),
        ({"max_long_anchors_per_continuation": -1}, r"max_long_anchors_per_continuation: got -1"),
        ({"recency_eviction": 1}, r"cache\.recency_eviction: got 1, expected True or False"),
        ({"max_concurency": 2}, r"unknown option max_concurency; the options are .*max_concurrency"),
        ({"cache": {"slots": 2}}, r"cache: unknown option slots"),
        ({"cache": 3}, r"cache: got int"),
    ],
)
def test_mistakes_name_field_value_and_bound(changes, message):
    # F-3
    with pytest.raises(OptionError, match=message):
        resolved(**changes)


def test_endpoint_anchors_need_room_for_an_anchor():
    assert resolved(max_long_anchors_per_continuation=0).cache.endpoint_anchors is False
    assert resolved(max_long_anchors_per_continuation=1).cache.endpoint_anchors is True


def test_numpy_integers_are_integers():
    assert resolved(max_context=np.int64(128)).max_context == 128
    assert type(resolved(max_context=np.int64(128)).max_context) is int


def test_the_cache_can_be_switched_by_its_mode():
    assert resolved(cache="disabled").cache.enabled is False
    assert resolved(cache="read_write").cache.enabled is True


def test_named_changes_reach_both_option_classes():
    options = make_engine_options(EngineOptions(max_context=512), max_concurrency=2, host_state_slots=3)
    assert options == EngineOptions(
        max_context=512, max_concurrency=2, cache=ContextCacheOptions(host_state_slots=3)
    )
