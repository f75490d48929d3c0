"""Parameters as callers give them: every bound, the merge with a checkpoint's defaults, a lane's numbers."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from ninfer_jax.errors import OptionError
from ninfer_jax.program.lane_sampling import dense_bias, token_mask
from ninfer_jax.sampling_params import NO_LOGPROBS, LaneSampling, SamplingParams, make_sampling_params

# generation_config.json of the later Qwen3.5 siblings (facts 8.2), as the frontend hands it on.
QWEN_DEFAULTS = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "do_sample": True}

BAD_VALUES = [
    ("temperature", -0.1, "from 0 .greedy. to 1e6"),
    ("temperature", math.inf, "a number"),
    ("temperature", math.nan, "a number"),
    ("temperature", "hot", "a number"),
    ("temperature", True, "a number"),
    ("top_p", 0.0, "above 0 and at most 1"),
    ("top_p", 1.01, "above 0 and at most 1"),
    ("top_k", -2, "-1 or 0 .off., or 1 and more"),
    ("top_k", 1.5, "an integer"),
    ("min_p", -0.1, "from 0 .off. to 1"),
    ("min_p", 1.1, "from 0 .off. to 1"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("repetition_penalty", 0.0, "above 0"),
    ("max_tokens", 0, "1 or more"),
    ("min_tokens", -1, "0 or more"),
    ("min_tokens", None, "an integer"),
    ("seed", -1, "0 to 2.63 - 1"),
    ("seed", 2**63, "0 to 2.63 - 1"),
    ("logprobs", 21, "0 to 20"),
    ("logprobs", True, "an integer"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("include_stop_str_in_output", "yes", "True or False"),
    ("stop", "", "at least one character"),
    ("stop", ["a", ""], "at least one character"),
    ("stop", 7, "a string or a sequence of strings"),
    ("stop_token_ids", [-1], "0 or more"),
    ("stop_token_ids", "12", "a sequence of token ids"),
    ("logit_bias", [(1, 2.0)], "a mapping"),
    ("logit_bias", {1: 100.5}, "from -100 to 100"),
    ("logit_bias", {1: math.nan}, "a number"),
    ("logit_bias", {1: None}, "from -100 to 100"),
    ("logit_bias", {"1": 1.0}, "an integer"),
]


@pytest.mark.parametrize(("name", "value", "bound"), BAD_VALUES)
def test_a_bad_value_is_named_with_its_bound(name: str, value: Any, bound: str) -> None:
    with pytest.raises(OptionError, match=rf"^{name}(\[1\])?: got .*{bound}"):
        SamplingParams(**{name: value}).validate()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": np.float32(0.7), "top_k": np.int64(5)},
        {"top_k": -1},
        {"top_p": 1e-9, "min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.1},
        {"max_tokens": 3, "min_tokens": 3},
        {"stop": "x"},
        {"stop": ["x", "yy"], "stop_token_ids": (1, 2)},
        {"logit_bias": {0: -100, 5: 100.0}, "logprobs": 20, "seed": 2**63 - 1},
    ],
)
def test_the_ends_of_every_range_are_inside(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).validate()
    SamplingParams(**fields).resolved({})


def test_contradiction_of_the_two_lengths() -> None:
    with pytest.raises(OptionError, match="min_tokens: got 5, expected at most max_tokens = 4"):
        SamplingParams(max_tokens=4, min_tokens=5).validate()


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_ids_must_be_in_the_vocabulary_where_it_is_known(name: str) -> None:
    params = SamplingParams(**{name: {100: 1.0} if name == "logit_bias" else [100]})
    params.validate(vocab_size=101)
    with pytest.raises(OptionError, match=f"{name}: got 100, expected 0 to 99, the vocabulary"):
        params.resolved({}, vocab_size=100)


@pytest.mark.parametrize(
    ("params", "defaults", "temperature"),
    [
        (SamplingParams(), {}, 0.0),  # nobody asked for sampling
        (SamplingParams(), QWEN_DEFAULTS, 1.0),
        (SamplingParams(), {"do_sample": True, "top_k": 20}, 1.0),
        (SamplingParams(temperature=0.0), QWEN_DEFAULTS, 0.0),  # greedy whatever the checkpoint says
        (SamplingParams(temperature=0.3), QWEN_DEFAULTS, 0.3),
        (SamplingParams(top_p=0.9), {}, 1.0),
        (SamplingParams(top_k=5), {}, 1.0),
        (SamplingParams(min_p=0.1), {}, 1.0),
        (SamplingParams(seed=0), {}, 1.0),
        (SamplingParams(presence_penalty=1.0), {}, 0.0),  # penalties act on greedy decoding too
    ],
)
def test_the_temperature_rule(params: SamplingParams, defaults: dict[str, Any], temperature: float) -> None:
    assert params.resolved(defaults).temperature == temperature


def test_none_takes_the_recommendation_and_a_value_beats_it() -> None:
    resolved = SamplingParams(top_k=-1, min_p=0.2).resolved({**QWEN_DEFAULTS, "presence_penalty": 1.5})
    assert resolved == SamplingParams(
        temperature=1.0,
        top_p=0.95,
        top_k=0,  # -1 turns the recommended 20 off
        min_p=0.2,
        presence_penalty=1.5,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )
    assert resolved.resolved({}) == resolved


def test_a_bad_recommendation_names_its_file() -> None:
    with pytest.raises(OptionError, match=r"generation_config\.json of the checkpoint: top_p: got 2"):
        SamplingParams().resolved({"top_p": 2.0, "do_sample": True})


def test_resolved_sequences_are_tuples() -> None:
    resolved = SamplingParams(stop="ab", stop_token_ids=[np.int32(3)]).resolved({})
    assert resolved.stop == ("ab",)
    assert resolved.stop_token_ids == (3,)


def test_params_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_lane_numbers() -> None:
    params = SamplingParams(
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        min_tokens=4,
        seed=7,
        stop_token_ids=(9, 2),
        logit_bias={5: 1, 3: -2.5},
        logprobs=3,
    ).resolved({})
    assert params.lane(eos_token_ids=frozenset({2, 1}), default_seed=99) == LaneSampling(
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        presence=0.1,
        frequency=0.2,
        repetition=1.3,
        seed=7,
        min_tokens=4,
        num_logprobs=3,
        logit_bias=((3, -2.5), (5, 1.0)),
        ban_token_ids=(1, 2, 9),
    )


def test_lane_without_a_seed_takes_the_engine_s() -> None:
    lane = SamplingParams().resolved({}).lane(eos_token_ids=(), default_seed=99)
    assert (lane.seed, lane.num_logprobs) == (99, NO_LOGPROBS)


def test_long_seeds_keep_both_halves() -> None:
    def seed_of(seed: int) -> int:
        return SamplingParams(seed=seed).resolved({}).lane(eos_token_ids=(), default_seed=0).seed

    assert seed_of(2**32 - 1) == 2**32 - 1  # a seed of 32 bits is itself
    assert seed_of(2**32 + 5) != seed_of(5)
    assert 0 <= seed_of(2**63 - 1) < 2**32


def test_lane_needs_resolved_parameters() -> None:
    with pytest.raises(OptionError, match="temperature: got None, expected a value; call resolved"):
        SamplingParams().lane(eos_token_ids=(), default_seed=0)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_new_tokens", "use max_tokens"),
        ("do_sample", "use temperature=0"),
        ("n", "use one request for each answer"),
        ("temprature", "the parameters are temperature, top_p"),
    ],
)
def test_unknown_names_say_what_to_use(name: str, advice: str) -> None:
    with pytest.raises(OptionError, match=f"unknown parameter {name}; {advice}"):
        make_sampling_params({name: 1})


def test_a_mapping_becomes_checked_parameters() -> None:
    assert make_sampling_params({"temperature": 0.5}) == SamplingParams(temperature=0.5)
    with pytest.raises(OptionError, match="top_p: got 3"):
        make_sampling_params({"top_p": 3})


def test_dense_bias_and_masks() -> None:
    lane = LaneSampling(logit_bias=((1, 2.0), (4, -1.0)))
    np.testing.assert_array_equal(dense_bias(lane, 5), np.float32([0, 2, 0, 0, -1]))
    np.testing.assert_array_equal(token_mask([3, 3, 0], 4), [True, False, False, True])
    np.testing.assert_array_equal(token_mask((), 2), [False, False])
    with pytest.raises(ValueError, match="logit_bias names token 4; ids go from 0 to 3"):
        dense_bias(lane, 4)
    with pytest.raises(ValueError, match=r"from 0 to 3, got -1\.\.2"):
        token_mask([2, -1], 4)


def test_integers_beyond_every_float_are_out_of_range() -> None:
    for params in (SamplingParams(temperature=10**400), SamplingParams(logit_bias={1: 10**400})):
        with pytest.raises(OptionError, match="expected a number"):
            params.validate()


@pytest.mark.parametrize("temperature", [1e7, 3e38, 1e308])
def test_a_temperature_that_float32_cannot_divide_by_is_refused(temperature: float) -> None:
    # at 3e38 the device drew padding ids: their score, the lowest float32, shrank to nothing
    with pytest.raises(OptionError, match=r"temperature: got .*, expected from 0"):
        SamplingParams(temperature=temperature).validate()
