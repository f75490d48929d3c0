"""PlanOutcome: one screen for a person, a file for a replay, one clear error for the rest (design 3.5)."""

import json
import random
from dataclasses import replace

import chex
import numpy as np
import pytest

from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.codec import decode, encode
from ninfer_jax.planner.cost import GENERIC_GPU, PrefillModel
from ninfer_jax.planner.ids import CheckpointKind, Tier
from ninfer_jax.planner.operations import CheckpointSpec, activate_root, add_owner
from ninfer_jax.planner.outcome import decide, differences, explain, from_json, replay
from ninfer_jax.planner.plan import Readiness
from ninfer_jax.planner.portfolio import make_facts
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.problem_json import PlanInputs, ReplayClock, _digest
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import EVICT


def ticking(step_ns=1000):
    """Returns a clock that moves by `step_ns` with every reading."""
    return ReplayClock(tuple(range(0, step_ns * 5000, step_ns)))


def pressured(num_owners=6, pages=60, prompt_tokens=64 * 30):
    """Returns inputs whose request fits only after something went: owners of two checkpoints each."""
    capacity = make_capacity(
        device_state_slots=2 * num_owners + 2,
        device_pages=pages,
        host_state_slots=4,
        host_kv_granules=12,
        granule_bytes=65536,
        state_image_bytes=1 << 20,
        page_bytes=(65536,),
        lanes=2,
    )
    state = make_state(capacity)
    for o in range(num_owners):
        tokens = 64 * 9 + 10 * o
        specs = [CheckpointSpec(300, CheckpointKind.LONG_ANCHOR, ordinal=1), CheckpointSpec(tokens)]
        state, _ = add_owner(state, specs, kv_tier=Tier.BOTH if o == 5 else Tier.DEVICE)
    request = make_request(prompt_tokens, 64)
    candidates = (root_candidate(request), Candidate(1, 1, Disposition.CONSUME, request))
    facts = make_facts(make_problem(state, candidates))
    return PlanInputs(state, candidates, facts, GENERIC_GPU, Budget())


@pytest.fixture(scope="module")
def outcome():
    return decide(pressured(), ticking())


def test_the_explanation_is_one_screen_and_says_all(outcome):
    text = outcome.explain()
    assert len(text.splitlines()) <= 40 and max(len(line) for line in text.splitlines()) <= 132
    d = outcome.decision
    assert d.readiness == Readiness.NEEDS_TRANSFER and d.owners
    for wanted in (
        "1,920 prompt tokens",
        "NEEDS_TRANSFER",
        f"{d.source.reused_tokens:,} reused",
        d.search.stop,
        d.owners[0].fate,
        "device_main_pages",
        "price",
        "rejected",
    ):
        assert wanted in text


def test_the_stage_table_shows_peak_and_capacity(outcome):
    row = next(r for r in explain(outcome).splitlines() if r.startswith("device_main_pages"))
    *use, peak, capacity = [int(x.replace(",", "")) for x in row.split()[1:]]
    assert use == [r[3] for r in outcome.decision.used]
    assert peak == max(use) <= capacity == 60


def test_the_price_split_adds_up(outcome):
    p = outcome.decision.price
    parts = [p.prefill_ns, p.pressure_ns, p.restore_ns, p.copy_ns, p.public_ns]
    assert p.total_ns == sum(parts) + sum(ns for _, ns in p.private_ns)


def test_an_owner_that_goes_is_said_to_go(outcome):
    evicted = [f for f in outcome.decision.owners if f.evicted]
    victims = [o for o in range(6) if o != outcome.decision.source.owner]
    codes = dict(zip(victims, (c for c in outcome.decision.codes if c != 1), strict=True))
    assert [f.owner for f in evicted] == [o for o, c in codes.items() if c == EVICT]
    assert all(f.num_dropped == f.num_checkpoints for f in evicted)


def test_replay_of_the_file_is_the_same_bit_for_bit(outcome):  # design 3.5
    text = outcome.to_json()
    again = from_json(text)
    chex.assert_trees_all_equal(again.inputs.state, outcome.inputs.state)
    assert again.decision == outcome.decision
    assert again.to_json() == text
    assert differences(again, replay(again)) == ()


def test_a_changed_price_gives_another_plan_and_says_where(outcome):
    cheap = replace(GENERIC_GPU, prefill=PrefillModel(1, 1, 1, 1, 1))  # rebuilding costs nothing now
    other = decide(replace(outcome.inputs, model=cheap), ReplayClock(outcome.inputs.readings))
    paths = differences(outcome, other)
    assert any(p.startswith("decision.price.prefill_ns") for p in paths)
    assert not any(p.startswith("decision.search.stop_meaning[") for p in paths)


def test_a_slower_clock_is_part_of_the_file():  # G-10: time may end a search, so readings are inputs
    inputs = replace(pressured(), budget=Budget(deadline_ns=30_000, first_window_ns=30_000))
    slow = decide(inputs, ticking(20_000))
    assert slow.decision.search.stop == "time_budget"
    assert differences(slow, replay(from_json(slow.to_json()))) == ()


@pytest.mark.parametrize(
    "inputs, readiness",
    [
        (pressured(prompt_tokens=64 * 200), Readiness.PERMANENTLY_INFEASIBLE),
        (replace(pressured(), vacant=0), Readiness.NEEDS_TRANSFER),
    ],
)
def test_other_answers_explain_and_replay(inputs, readiness):
    got = decide(inputs, ticking())
    assert got.decision.readiness == readiness
    assert readiness.name in got.explain()
    assert differences(got, replay(from_json(got.to_json()))) == ()


def test_blocked_by_an_active_sequence():  # G-5
    inputs = pressured()
    state, _ = activate_root(make_state(make_capacity(device_state_slots=2, device_pages=40)), 64 * 20)
    root = (root_candidate(make_request(64 * 30, 0)),)
    facts = make_facts(make_problem(state, root))
    got = decide(replace(inputs, state=state, candidates=root, facts=facts), ticking())
    assert got.decision.readiness == Readiness.TEMPORARILY_BLOCKED
    assert "TEMPORARILY_BLOCKED" in got.explain()


# ---------------------------------------------------------------- damaged and foreign files


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "not JSON"),
        ("{}", "no ninfer-jax-plan file"),
        ('{"artifact_type": "something", "schema_version": 1}', "no ninfer-jax-plan file"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ('{"artifact_type": "ninfer-jax-plan", "schema_version": 7}', "version 7"),
        ('{"artifact_type": "ninfer-jax-plan", "schema_version": 2}', "sections"),
    ],
)
def test_a_foreign_file_is_one_clear_line(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_json(text)
    assert "\n" not in str(caught.value).strip()


def test_random_damage_is_never_anything_but_a_value_error(outcome):
    rng = random.Random(5)
    text = outcome.to_json()
    for _ in range(150):
        damaged = bytearray(text.rstrip("\n").encode())
        if rng.random() < 0.4:
            del damaged[rng.randrange(len(damaged)) :]
        else:
            for _ in range(rng.choice([1, 1, 5, 40])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if bytes(damaged) == text.rstrip("\n").encode():
            continue
        with pytest.raises(ValueError, match="plan file"):
            from_json(bytes(damaged))


def leaves(value, path=()):
    """Yields (container, key) of every JSON leaf."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list):
            yield from leaves(item)


def test_a_forged_file_is_a_value_error_or_a_plan(outcome):
    """A mutation under a matching digest meets the checks behind it; whatever passes can be explained."""
    rng = random.Random(6)
    survived = 0
    for _ in range(60):
        top = json.loads(outcome.to_json())
        body = {k: top[k] for k in ("inputs", "decision")}
        places = list(leaves(body))
        for _ in range(rng.choice([1, 1, 3])):
            container, key = rng.choice(places)
            container[key] = rng.choice([None, -1, 0, 1, 7, 10**6, 2**70, True, "x", [], {}, [1], 1.5])
        try:
            top["digest"] = _digest(body)
            forged = from_json(json.dumps(top | body))
        except ValueError:
            continue
        survived += 1
        assert forged.explain()
        try:
            replay(forged)
        except ValueError:
            pass
    assert survived < 30


def test_the_codec_refuses_what_it_cannot_give_back():
    with pytest.raises(TypeError, match="float"):
        encode(1.5)
    with pytest.raises(TypeError, match="float64"):
        encode(np.zeros(2))
    with pytest.raises(ValueError, match=r"budget: missing max_work, unknown 'max_wrk'"):
        source = encode(Budget())
        source["max_wrk"] = source.pop("max_work")
        decode(Budget, source, "budget")
    assert decode(Budget, encode(Budget(max_targets=3)), "budget") == Budget(max_targets=3)
