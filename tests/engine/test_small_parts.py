"""The parts around the loop: hints, lifecycle, places, kinds of prompt, progress, cache folder."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest

from ninfer_jax import model, options
from ninfer_jax.checks import checked_seconds
from ninfer_jax.compile_cache import compile_cache_directory, processor_digest
from ninfer_jax.errors import InvariantError, OptionError, PromptError, RequestError, RequestErrorKind
from ninfer_jax.identity import Evidence
from ninfer_jax.outstanding import OutstandingGate
from ninfer_jax.planner.plan import Readiness
from ninfer_jax.prompts import is_messages, is_token_ids, one_or_many
from ninfer_jax.request import (
    CacheMarker,
    RequestState,
    checked_transition,
    make_request_hints,
)
from ninfer_jax.sampling_params import SamplingParams


def hints(**changes):
    return make_request_hints(**{"cache_enabled": True, "max_long_anchors": 2, **changes})


@pytest.mark.parametrize(
    ("given", "retention"),
    [
        ({}, "recent_private"),
        ({"session": "ana"}, "live_session"),
        ({"session": "ana", "retention": "disposable"}, "disposable"),
        ({"retention": "disposable"}, "disposable"),
        ({"session": "ana", "retention": "recent_private"}, "recent_private"),
    ],
)
def test_retention_follows_the_session(given, retention):
    # design 6
    assert hints(**given).retention == retention


def test_session_length_is_counted_in_bytes():
    # conventions 1: 1..256 bytes
    assert hints(session="x" * 256).session == "x" * 256
    with pytest.raises(OptionError, match=r"session: got 258 bytes, expected 1\.\.256"):
        hints(session="ä" * 129)
    with pytest.raises(OptionError, match="session: got int"):
        hints(session=7)


def test_cand_03_four_markers_at_most():
    # CAND-03, N-4
    markers = [CacheMarker(count) for count in (1, 2, 3, 4)]
    assert hints(markers=markers).markers == tuple(markers)
    with pytest.raises(OptionError, match="markers: got 5, expected at most 4"):
        hints(markers=[*markers, CacheMarker(5)])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("here", r"markers\[0\]: got str, expected CacheMarker"),
        (CacheMarker(-1), r"markers\[0\]\.count: got -1"),
        (CacheMarker(1, kind="other"), r"markers\[0\]\.kind: got 'other'"),  # type: ignore[arg-type]
        (CacheMarker(1, place="end"), r"markers\[0\]\.place: got 'end'"),  # type: ignore[arg-type]
        (CacheMarker(1, evidence=Evidence(0)), r"markers\[0\]\.evidence: a shared marker needs"),
        (CacheMarker(1, evidence=Evidence.ENGINE_OBSERVED), r"markers\[0\]\.evidence: got .*ENGINE_OBSERVED"),
    ],
)
def test_bad_markers_say_which(marker, message):
    with pytest.raises(OptionError, match=message):
        hints(markers=[marker])


def test_a_private_marker_needs_no_evidence():
    assert hints(markers=[CacheMarker(1, kind="private_long_anchor", evidence=Evidence(0))]).markers


def test_automatic_anchors_default_to_the_engines_bound_and_stay_within_it():
    # N-6; without a cache there are none
    assert [hints(automatic_private_anchors=n).automatic_private_anchors for n in (None, 0, 1, 9)] == [
        2,
        0,
        1,
        2,
    ]
    assert hints(cache="disabled").automatic_private_anchors == 0
    assert hints(cache_enabled=False).cache == "disabled"


def test_the_lifecycle_has_no_way_back_from_the_end():
    #
    for state in RequestState:
        with pytest.raises(InvariantError, match="cannot go from finished"):
            checked_transition(RequestState.FINISHED, state)
    chain = ["WAITING", "MATERIALIZING", "PREFILL", "DECODE_READY", "TERMINAL_PENDING", "FINISHED"]
    for current, following in itertools.pairwise(chain):
        checked_transition(RequestState[current], RequestState[following])
    with pytest.raises(InvariantError, match="cannot go from waiting to decode_ready"):
        checked_transition(RequestState.WAITING, RequestState.DECODE_READY)


@pytest.mark.parametrize("order", ["response first", "consumer first"])
def test_a_place_is_released_exactly_once(order):
    #
    gate = OutstandingGate(2)
    slot, other = gate.try_acquire(), gate.try_acquire()
    assert gate.try_acquire() is None
    first, second = slot.response_done, slot.consumer_released
    if order == "consumer first":
        first, second = second, first
    first()
    first()
    assert gate.held == 2
    for _ in range(3):
        second()
        first()
    assert gate.held == 1
    other.response_done()
    other.consumer_released()
    assert gate.held == 0


def test_waking_ends_a_wait_although_nothing_came_free():
    # a waiter must notice that the engine closed
    gate = OutstandingGate(1)
    gate.try_acquire()
    waiter = threading.Thread(target=gate.wait_for_room, args=(60,))
    waiter.start()
    while waiter.is_alive():  # it may not have begun to wait at the first call
        gate.wake()
        waiter.join(0.01)


def test_places_under_contention_add_up():
    gate = OutstandingGate(3)
    peak = []

    def work():
        for _ in range(200):
            while (slot := gate.try_acquire()) is None:
                gate.wait_for_room(1)
            peak.append(gate.held)
            sides = [
                threading.Thread(target=slot.response_done),
                threading.Thread(target=slot.consumer_released),
            ]
            if len(peak) % 20 == 0:
                for side in sides:
                    side.start()
                for side in sides:
                    side.join()
            else:
                slot.response_done()
                slot.consumer_released()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert gate.held == 0 and max(peak) <= 3


def test_kinds_of_prompt():
    messages = [{"role": "user", "content": "hi"}]
    assert is_messages(messages) and not is_messages([1]) and not is_messages("hi") and not is_messages([])
    assert is_token_ids([1, 2]) and is_token_ids(np.array([1, 2])) and is_token_ids([np.int32(1)])
    assert (
        not is_token_ids([True])
        and not is_token_ids([1.0])
        and not is_token_ids([])
        and not is_token_ids("12")
    )
    for single in ("text", [1, 2], messages):
        assert one_or_many(single) == ([single], True)
    for many in (["a", "b"], [[1], [2, 3]], [messages, messages], []):
        assert one_or_many(many) == (many, False)
    with pytest.raises(PromptError, match="prompts: got NoneType"):
        one_or_many(None)


def test_progress_is_for_terminals(kit, capsys):
    engine = kit.engine()
    sampling = SamplingParams(max_tokens=2)
    engine.generate([[1], [2]], sampling)
    assert capsys.readouterr() == ("", "")
    engine.generate([[1], [2]], sampling, show_progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err != ""


def test_a_head_that_nothing_can_free_is_answered_at_once(kit, monkeypatch):
    # design 6: blocked with nothing active is overloaded, not a hang
    engine = kit.engine()
    manager = engine._worker._manager
    plan = manager.plan

    def blocked(*args, **kwargs):
        admission = plan(*args, **kwargs)
        planned = dataclasses.replace(admission.planned, readiness=Readiness.TEMPORARILY_BLOCKED, plan=None)
        return dataclasses.replace(admission, planned=planned)

    monkeypatch.setattr(manager, "plan", blocked)
    handle = engine.submit([1])
    with pytest.raises(RequestError, match="nothing is active") as refused:
        handle.result()
    assert refused.value.kind is RequestErrorKind.OVERLOADED


def test_where_compiled_programs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache_directory("off", "/elsewhere", "1.0") is None
    assert compile_cache_directory("/mine", "/elsewhere", "1.0").as_posix() == "/mine"
    assert compile_cache_directory(None, "/elsewhere", "1.0").as_posix() == "/elsewhere"
    default = compile_cache_directory(None, None, "1.0")
    assert default == tmp_path / "ninfer_jax" / f"jax-1.0-{processor_digest()}" and default.is_dir()
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    assert compile_cache_directory(None, None, "1.0") is None


def test_model_and_engine_mean_the_same_page():
    # K-2: two numbers, because options are read before JAX and the model are loaded
    assert options.PAGE_TOKENS == model.PAGE_TOKENS


@pytest.mark.parametrize("wrong", [5, None])
def test_markers_must_be_a_sequence(wrong):
    with pytest.raises(OptionError, match="markers: got"):
        hints(markers=wrong)


@pytest.mark.parametrize("seconds", [np.float32(5), np.int64(5), 5])
def test_seconds_may_be_any_real_number(seconds):
    assert checked_seconds("timeout_s", seconds) == 5.0
