"""Owns the dense form of a lane's sampling over the vocabulary, as the device takes it when a lane is set.

It does not own the numbers themselves (`ninfer_jax.sampling_params.LaneSampling`) nor the device side
(`ninfer_jax.model.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer_jax.sampling_params import NO_LOGPROBS, LaneSampling

__all__ = ["NO_LOGPROBS", "LaneSampling", "dense_bias", "token_mask"]


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
