"""Owns how an answer is drawn and when it ends, as a caller says it, and its reduction to one lane's numbers.

It does not own what a checkpoint recommends (`frontend.generation_config`), the limits that need the prompt's
length (`prepare`), nor the device side (`ninfer_jax.model.sampling`, which defines each parameter exactly).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ninfer_jax.checks import MAX_INT32, MAX_INT64, checked_flag, checked_integer
from ninfer_jax.errors import OptionError

# `LaneSampling.num_logprobs` of a lane that wants none; 0 means the drawn token's alone.
NO_LOGPROBS = -1

# Already uniform; far beyond it, float32 would shrink even the scores of ids that must not be drawn to 0.
MAX_TEMPERATURE = 1e6
MAX_LOGPROBS = 20  # columns that a step reports
MAX_ABS_LOGIT_BIAS = 100.0  # OpenAI's range
MAX_ABS_PENALTY = 2.0  # OpenAI's range

# What a parameter is when neither the caller nor the checkpoint names it; temperature has its own rule.
_NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

# Names of other libraries, with what to write here.
_FOREIGN_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "do_sample": "temperature=0 for greedy, above 0 to sample",
    "n": "one request for each answer",
    "best_of": "one request for each answer",
    "top_logprobs": "logprobs",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "prompt_logprobs": "load_model(...).logits(token_ids)",
}


@dataclass(frozen=True)
class LaneSampling:
    """Everything a lane needs to draw its tokens; every default is already filled in.

    The scalars go to the fields of the same name of `SamplingRows`. `SamplingRows.ban_eos` of the draw with
    output index `step` is `step < min_tokens`. `logit_bias`, `ban_token_ids` and the prompt go to `set_lane`
    once, when the lane is taken: see `program.lane_sampling`.
    """

    temperature: float = 0.0  # 0 means greedy
    top_k: int = 0  # 0 means off
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0  # uint32
    min_tokens: int = 0
    num_logprobs: int = NO_LOGPROBS  # -1 none, 0 the drawn token's, n its own and the n best
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value), ids distinct
    ban_token_ids: tuple[int, ...] = ()  # EOS and stop ids: not drawn while the output index < min_tokens


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is drawn and when it ends. Names and meanings are those of vLLM and OpenAI.

    None in the first seven means the checkpoint's recommendation (generation_config.json). Where it has none,
    a parameter is off, and the temperature is 0 (greedy) unless the caller set top_p, top_k, min_p or seed,
    which say that sampling is wanted: then it is 1. Values are checked where they are used, or by `validate`.

    Args:
        temperature: 0 is greedy, and so is anything below 1e-5.
        top_p: (0, 1], 1 is off.
        top_k: 0 and -1 are off.
        min_p: [0, 1], relative to the likeliest token, 0 is off.
        presence_penalty: [-2, 2], once for every id in the output.
        frequency_penalty: [-2, 2], times its count in the output.
        repetition_penalty: above 0, ids of prompt and output, 1 is off.
        max_tokens: of the answer; None is what the context allows, and more than that is cut to it.
        min_tokens: EOS and stop_token_ids are not drawn before.
        seed: None lets the engine choose.
        stop: the answer ends before the first of these strings.
        stop_token_ids: beside the checkpoint's EOS ids.
        include_stop_str_in_output: the answer ends behind the stop string instead.
        ignore_eos: the checkpoint's EOS ids do not end the answer.
        skip_special_tokens: in the text.
        logit_bias: token id to [-100, 100], added to its logit.
        logprobs: 0 reports the drawn token's, n up to 20 also the n likeliest, None none.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Checks every field, and the fields against each other.

        Args:
            vocab_size: ids that the request names must be below it, where it is known.

        Raises:
            OptionError: naming the field, its value and the bound it breaks.
        """
        _real("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "from 0 (greedy) to 1e6")
        _real("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1 (off)", open_low=True)
        _integer("top_k", self.top_k, -1, MAX_INT32, "-1 or 0 (off), or 1 and more")
        _real("min_p", self.min_p, 0.0, 1.0, "from 0 (off) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), -MAX_ABS_PENALTY, MAX_ABS_PENALTY, "from -2 to 2, 0 is off")
        _real(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            math.inf,
            "above 0, 1 is off",
            open_low=True,
        )
        _integer(
            "max_tokens", self.max_tokens, 1, MAX_INT32, "1 or more, or None for what the context allows"
        )
        checked_integer("min_tokens", self.min_tokens, 0, MAX_INT32, expected="0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                f"min_tokens: got {self.min_tokens}, expected at most max_tokens = {self.max_tokens}"
            )
        _integer("seed", self.seed, 0, MAX_INT64, "0 to 2^63 - 1, or None")
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None for none")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            checked_flag(name, getattr(self, name))
        _check_stops(self.stop)
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_bias(self.logit_bias, vocab_size)

    def resolved(self, defaults: Mapping[str, Any], *, vocab_size: int | None = None) -> SamplingParams:
        """Returns the parameters with every recommendation and neutral value filled in.

        max_tokens, seed and logprobs may stay None: the context and the engine decide the first two, and
        the third means that none are reported.

        Args:
            defaults: the checkpoint's recommendation by field name; names that are no fields are ignored.
            vocab_size: see `validate`.

        Raises:
            OptionError: naming the field, its value and the bound it breaks.
        """
        self.validate(vocab_size=vocab_size)
        values: dict[str, Any] = {}
        for name, neutral in _NEUTRAL.items():
            given = getattr(self, name)
            values[name] = defaults.get(name, neutral) if given is None else given
        values["temperature"] = self._resolved_temperature(defaults)
        values["top_k"] = max(0, values["top_k"])
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        values["stop_token_ids"] = tuple(operator.index(token) for token in self.stop_token_ids)
        resolved = dataclasses.replace(self, **values)
        try:
            resolved.validate(vocab_size=vocab_size)
        except OptionError as error:
            raise OptionError(f"generation_config.json of the checkpoint: {error}") from error
        return resolved

    def lane(
        self, *, eos_token_ids: Collection[int], default_seed: int, vocab_size: int | None = None
    ) -> LaneSampling:
        """Returns the numbers of the lane that draws this answer.

        Args:
            eos_token_ids: of the checkpoint.
            default_seed: uint32, used where the caller named none.
            vocab_size: see `validate`.

        Raises:
            OptionError: if a field breaks a bound, or one of the first group is still None (see `resolved`).
        """
        self.validate(vocab_size=vocab_size)
        missing = [name for name in ("temperature", *_NEUTRAL) if getattr(self, name) is None]
        if missing:
            raise OptionError(f"{missing[0]}: got None, expected a value; call resolved(defaults) first")
        seed = default_seed if self.seed is None else self.seed
        bias = self.logit_bias or {}
        return LaneSampling(
            temperature=float(self.temperature or 0.0),
            top_k=max(0, operator.index(self.top_k or 0)),
            top_p=_float(self.top_p),
            min_p=_float(self.min_p),
            presence=_float(self.presence_penalty),
            frequency=_float(self.frequency_penalty),
            repetition=_float(self.repetition_penalty),
            # Both halves count, so that seeds of 64 bits that share their low half still differ.
            seed=(seed ^ (seed >> 32)) & 0xFFFFFFFF,
            min_tokens=operator.index(self.min_tokens),
            num_logprobs=NO_LOGPROBS if self.logprobs is None else operator.index(self.logprobs),
            logit_bias=tuple(sorted((operator.index(token), float(value)) for token, value in bias.items())),
            ban_token_ids=tuple(
                sorted({*map(operator.index, eos_token_ids), *map(operator.index, self.stop_token_ids)})
            ),
        )

    def _resolved_temperature(self, defaults: Mapping[str, Any]) -> float:
        if self.temperature is not None:
            return self.temperature
        if defaults.get("temperature") is not None:
            return defaults["temperature"]
        # A checkpoint that recommends sampling without a temperature means 1, the default of transformers.
        wants_sampling = bool(defaults.get("do_sample")) or any(
            getattr(self, name) is not None for name in ("top_p", "top_k", "min_p", "seed")
        )
        return 1.0 if wants_sampling else 0.0


def advice_for(name: str) -> str | None:
    """Returns how to give a sampling parameter, by its own or another library's name; None for others."""
    if name in {field.name for field in dataclasses.fields(SamplingParams)}:
        return f"pass it as sampling=SamplingParams({name}=...)"
    foreign = _FOREIGN_NAMES.get(name)
    return None if foreign is None else f"in SamplingParams use {foreign}"


def make_sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Returns checked parameters from a mapping, such as a request body's.

    Args:
        fields: values by field name.

    Raises:
        OptionError: for a name that is no parameter (with the name to use here, if it is another library's),
            or a value out of range.
    """
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        hint = _FOREIGN_NAMES.get(unknown[0])
        advice = f"use {hint}" if hint else f"the parameters are {', '.join(known)}"
        raise OptionError(f"sampling: unknown parameter {unknown[0]}; {advice}")
    params = SamplingParams(**fields)
    params.validate()
    return params


def _real(name: str, got: object, low: float, high: float, bound: str, *, open_low: bool = False) -> None:
    if got is None:
        return
    try:
        value = float(got) if isinstance(got, Real) and not isinstance(got, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise OptionError(f"{name}: got {got!r}, expected a number {bound}")
    if not low <= value <= high or (open_low and value == low):
        raise OptionError(f"{name}: got {got}, expected {bound}")


def _integer(name: str, got: object, low: int, high: int, bound: str) -> None:
    if got is not None:
        checked_integer(name, got, low, high, expected=bound)


def _check_stops(stop: object) -> None:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence):
        raise OptionError(f"stop: got {stop!r}, expected a string or a sequence of strings")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise OptionError(f"stop: got {text!r}, expected strings of at least one character")


def _check_ids(name: str, ids: object, vocab_size: int | None) -> None:
    if isinstance(ids, str) or not isinstance(ids, Collection):
        raise OptionError(f"{name}: got {ids!r}, expected a sequence of token ids")
    for token in ids:
        if vocab_size is None:
            checked_integer(name, token, 0, MAX_INT32, expected="0 or more")
        else:
            checked_integer(name, token, 0, vocab_size - 1, expected=f"0 to {vocab_size - 1}, the vocabulary")


def _check_bias(bias: object, vocab_size: int | None) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias: got {bias!r}, expected a mapping from token ids to numbers")
    _check_ids("logit_bias", bias.keys(), vocab_size)
    for token, value in bias.items():
        limit = MAX_ABS_LOGIT_BIAS
        if value is None:
            raise OptionError(f"logit_bias[{token}]: got None, expected a number from -100 to 100")
        _real(f"logit_bias[{token}]", value, -limit, limit, "from -100 to 100")


def _float(value: float | None) -> float:
    assert value is not None  # `lane` has refused None
    return float(value)
