"""What a checkpoint says about ending and sampling an answer.

Owns the union of end-of-sequence ids and the sampling defaults. It decides nothing about a request: the
engine resolves its sampling parameters against these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True)
class GenerationConfig:
    """End-of-sequence ids, and the sampling that the checkpoint's authors recommend (empty: greedy)."""

    eos_token_ids: frozenset[int]
    defaults: Mapping[str, Any]


def make_generation_config(
    *,
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
    tokenizer_eos: int | None,
    vocab_size: int,
) -> GenerationConfig:
    """Returns the ids that end an answer and the sampling defaults.

    All sources are united, because each alone is wrong somewhere: the text config of Qwen3.5 names only
    ``<|endoftext|>``, which does not end a chat turn, and its tokenizer only ``<|im_end|>`` (facts 8.2).

    Args:
        generation: generation_config.json, or empty.
        model: config.json, or empty; its ``text_config`` counts too.
        tokenizer_eos: id of the tokenizer's own eos token.
        vocab_size: ids outside 0..vocab_size-1 can never be drawn and are left out.
    """
    text = model.get("text_config")
    sources = [generation.get("eos_token_id"), model.get("eos_token_id"), tokenizer_eos]
    if isinstance(text, Mapping):
        sources.append(text.get("eos_token_id"))
    ids = {token for source in sources for token in _id_list(source) if 0 <= token < vocab_size}
    # Authors who set do_sample false mean greedy, whatever temperature their file still carries.
    defaults = {}
    if generation.get("do_sample") is True:
        defaults = {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}
        defaults["do_sample"] = True
    return GenerationConfig(frozenset(ids), defaults)


def _id_list(source: Any) -> list[int]:
    items = source if isinstance(source, list | tuple) else [source]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
