"""Prefix digests: short names of prompt prefixes that narrow a search and prove nothing (C-6).

Owns the arithmetic of two independent 64-bit lanes per frontier. Who finds an equal key still compares the
prompts exactly; whoever finds no equal key may stop looking, because equal prompts have equal keys.

A lane is a polynomial in a fixed odd base over the mixed content of every token, kept as running sums in
wrapping 64-bit arithmetic, so any frontier costs the same. S is the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from ninfer_jax.identity import MediaSpan, PromptIdentity
from ninfer_jax.reuse import PrefixKey

NUM_LANES: Final = 2
_MASK: Final = 2**64 - 1
_BASES: Final = (0x9E6C63D0876A9A47, 0xC8764D2F5C1E94B3)  # odd, so that powers never vanish
_SEEDS: Final = (0x2545F4914F6CDD1D, 0x6A09E667F3BCC909)
_TAG_TOKEN, _TAG_REWRITE, _TAG_MEDIA, _TAG_END = 1, 2, 3, 4


@dataclass(frozen=True, eq=False)
class PrefixDigests:
    """The keys of every frontier of one prompt. Build with `make_digests`, grow with `extend_digests`.

    Attributes:
        sums: running lane values; column f covers the first f tokens.
        powers: the two bases to the power S, where an extension goes on.
        rewrites: rewrite execution frontiers, ascending; each is part of every key at or beyond it (C-7).
        rewrite_sums: running lane values over them.
        media_ends: where the media spans end, ascending; a span is part of every key at or beyond its end.
        media_sums: running lane values over them.
        next_position: position of the next text token.
    """

    sums: np.ndarray  # uint64[2, S + 1]
    powers: np.ndarray  # uint64[2]
    rewrites: tuple[int, ...]
    rewrite_sums: np.ndarray  # uint64[2, len(rewrites) + 1]
    media_ends: tuple[int, ...]
    media_sums: np.ndarray  # uint64[2, len(media_ends) + 1]
    mode: str
    next_position: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens, S."""
        return self.sums.shape[1] - 1

    def key(self, frontier_tokens: int) -> PrefixKey:
        """Returns the key of the first ``frontier_tokens`` tokens.

        Raises:
            ValueError: if the prompt is shorter.
        """
        f = frontier_tokens
        if not 0 <= f <= self.num_tokens:
            raise ValueError(f"frontier {f} is outside of this prompt of {self.num_tokens} tokens")
        rewrites = int(np.searchsorted(self.rewrites, f, side="right"))
        media = int(np.searchsorted(self.media_ends, f, side="right"))
        lanes = []
        for lane in range(NUM_LANES):
            value = int(self.sums[lane, f]) + int(self.rewrite_sums[lane, rewrites])
            value += int(self.media_sums[lane, media])
            lanes.append(_mixed_int((value ^ (_TAG_END * _SEEDS[lane]) ^ f) & _MASK))
        return PrefixKey(lanes[0] or 1, lanes[1], f, self.mode)


def make_digests(identity: PromptIdentity) -> PrefixDigests:
    """Returns the digests of a prompt."""
    spans = sorted(identity.media, key=lambda span: (span.end_tokens, span.start_tokens))
    rewrites = identity.rewrite_execution_frontiers
    ones = np.ones(NUM_LANES, np.uint64)
    sums, powers = _run(identity.tokens, identity.token_types, identity.positions, ones)
    frontiers = np.asarray(rewrites, np.uint64)
    return PrefixDigests(
        sums=np.concatenate([np.zeros((NUM_LANES, 1), np.uint64), sums], axis=1),
        powers=powers,
        rewrites=rewrites,
        rewrite_sums=_prefix_sums([_mixed(frontiers, lane, _TAG_REWRITE) for lane in range(NUM_LANES)]),
        media_ends=tuple(span.end_tokens for span in spans),
        media_sums=_prefix_sums([_media_values(spans, lane) for lane in range(NUM_LANES)]),
        mode=identity.mode,
        next_position=identity.num_tokens + identity.rope_delta,
    )


def extend_digests(digests: PrefixDigests, tokens: Sequence[int] | np.ndarray) -> PrefixDigests:
    """Returns the digests after more text tokens, such as an answer; only the new tokens are mixed."""
    more = np.asarray(tokens, np.int32)
    steps = np.arange(digests.next_position, digests.next_position + len(more), dtype=np.int32)
    positions = np.broadcast_to(steps, (3, len(more)))
    sums, powers = _run(more, np.zeros(len(more), np.int8), positions, digests.powers)
    return PrefixDigests(
        sums=np.concatenate([digests.sums, digests.sums[:, -1:] + sums], axis=1),
        powers=powers,
        rewrites=digests.rewrites,
        rewrite_sums=digests.rewrite_sums,
        media_ends=digests.media_ends,
        media_sums=digests.media_sums,
        mode=digests.mode,
        next_position=digests.next_position + len(more),
    )


def _run(
    tokens: np.ndarray, types: np.ndarray, positions: np.ndarray, powers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns uint64[2, n] running sums of the new tokens alone, and the powers after them."""
    content = [np.asarray(a).astype(np.int64).astype(np.uint64) for a in (tokens, types, *positions)]
    sums, after = [], []
    for lane in range(NUM_LANES):
        value = np.full(len(content[0]), (_TAG_TOKEN * _SEEDS[lane]) & _MASK, np.uint64)
        for part in content:
            value = _splitmix(value ^ part)
        steps = np.full(len(value) + 1, _BASES[lane], np.uint64)
        steps[0] = powers[lane]
        weights = np.multiply.accumulate(steps)
        sums.append(np.add.accumulate(value * weights[:-1]))
        after.append(weights[-1])
    return np.stack(sums), np.asarray(after, np.uint64)


def _media_values(spans: Sequence[MediaSpan], lane: int) -> np.ndarray:
    """Returns uint64[len(spans)]."""
    names = [
        int.from_bytes(
            blake2b(
                b"%d %d %d " % (s.start_tokens, s.end_tokens, s.token_type) + s.digest, digest_size=8
            ).digest(),
            "little",
        )
        for s in spans
    ]
    return _mixed(np.asarray(names, np.uint64), lane, _TAG_MEDIA)


def _mixed(values: np.ndarray, lane: int, tag: int) -> np.ndarray:
    return _splitmix(values ^ np.uint64((tag * _SEEDS[lane]) & _MASK))


def _prefix_sums(lanes: Sequence[np.ndarray]) -> np.ndarray:
    """Returns uint64[2, n + 1]."""
    return np.stack([np.concatenate([np.zeros(1, np.uint64), np.add.accumulate(v)]) for v in lanes])


def _splitmix(value: np.ndarray) -> np.ndarray:
    """Returns uint64[n], a bijection in which every input bit reaches every output bit."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mixed_int(value: int) -> int:
    """Returns `_splitmix` of one Python int, without NumPy's overflow warnings on scalars."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
