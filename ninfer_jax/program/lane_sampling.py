"""Owns the numbers one lane samples with, as plain Python values, and their dense form over the vocabulary.

It does not own the user's parameters (`ninfer_jax.sampling_params` checks and resolves those and builds
this value) nor the device side (`ninfer_jax.model.sampling`). Program reads it to fill one row of
`SamplingRows` and one lane of `SamplerState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# `num_logprobs` of a lane that wants none; 0 means the drawn token's alone.
NO_LOGPROBS = -1


@dataclass(frozen=True)
class LaneSampling:
    """Everything a lane needs to draw its tokens; every default is already filled in.

    The scalars go to the fields of the same name of `SamplingRows`. `SamplingRows.ban_eos` of the draw with
    output index `step` is `step < min_tokens`. `logit_bias`, `ban_token_ids` and the prompt go to `set_lane`
    once, when the lane is taken: see `dense_bias`, `token_mask`.
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


def dense_bias(lane: LaneSampling, vocab_size: int) -> np.ndarray:
    """Returns the lane's logit bias over the whole vocabulary.

    Args:
        lane: the lane's numbers.
        vocab_size: rows of the output head, V.

    Returns:
        f32[V], zero where the request gave no bias.

    Raises:
        ValueError: if a biased id is outside [0, vocab_size).
    """
    bias = np.zeros(vocab_size, np.float32)
    for token_id, value in lane.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"logit_bias names token {token_id}; ids go from 0 to {vocab_size - 1}")
        bias[token_id] = value
    return bias


def token_mask(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns which ids of the vocabulary occur in a list.

    Serves the tokens of the prompt (`prompt_seen`) and the ids held back until `min_tokens` (`early_ban`).

    Args:
        token_ids: ids in any order, repeats allowed.
        vocab_size: rows of the output head, V.

    Returns:
        bool[V].

    Raises:
        ValueError: if an id is outside [0, vocab_size).
    """
    ids = np.asarray(token_ids, np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"token ids go from 0 to {vocab_size - 1}, got {int(ids.min())}..{int(ids.max())}")
    mask = np.zeros(vocab_size, bool)
    mask[ids] = True
    return mask
