"""Which kind of prompt a caller passed: text, token ids, or messages; one, or many.

Owns the telling apart only. The frontend renders and tokenises, and knows what ids exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ninfer_jax.errors import PromptError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Messages


def is_messages(prompt: object) -> bool:
    """Whether this is one conversation: a sequence of mappings."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def is_token_ids(prompt: object) -> bool:
    """Whether this is one prompt of token ids: integers, in a sequence or a one-dimensional array."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)
    )


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Returns the prompts as a list, and whether the caller passed a single one.

    Raises:
        PromptError: if it is neither one prompt nor a sequence of prompts.
    """
    if isinstance(prompts, str) or is_messages(prompts) or is_token_ids(prompts):
        return [prompts], True  # type: ignore[list-item]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 2:
        return list(prompts), False
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return list(prompts), False  # type: ignore[arg-type]
    raise PromptError(
        f"prompts: got {type(prompts).__name__}, expected text, token ids, messages, or a list of those"
    )
