"""Owns what the model tests share: the small reference checkpoints and a minimal one-sequence server."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model import (
    PAGE_TOKENS,
    DecodeBatch,
    LoadedModel,
    PrefillChunk,
    decode_step,
    load_model,
    make_cache,
    make_cache_spec,
    prefill_chunk,
)
from ninfer_jax.model.transformer import text_positions

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "reference"


class Server:
    """Runs single sequences through jitted steps; pages and slots are picked by the test."""

    def __init__(self, model: LoadedModel, num_pages: int = 6, num_slots: int = 4) -> None:
        self.model = model
        self.num_slots = num_slots
        self.cache = make_cache(make_cache_spec(model.config, model.dtype.name), num_pages, num_slots)

        @functools.partial(jax.jit, donate_argnames=("cache",))
        def prefill(leaves, cache, chunk):
            return prefill_chunk(model.module(leaves), cache, chunk)

        @functools.partial(jax.jit, donate_argnames=("cache",))
        def decode(leaves, cache, batch):
            return decode_step(model.module(leaves), cache, batch)

        self.prefill_fn, self.decode_fn = prefill, decode

    def chunk(self, tokens, start, *, pages, read, write, bucket=128, filler=0) -> PrefillChunk:
        padded = np.full(bucket, filler, np.int32)
        padded[: len(tokens)] = tokens
        return PrefillChunk(
            tokens=jnp.asarray(padded),
            positions=text_positions(bucket, start),
            block_table=jnp.asarray(pages, jnp.int32),
            start_tokens=jnp.int32(start),
            num_tokens=jnp.int32(len(tokens)),
            read_slot=jnp.int32(read),
            write_slot=jnp.int32(write),
        )

    def prefill(self, tokens, start=0, *, pages=(0, 1, 2), read=None, write=0, **kwargs) -> np.ndarray:
        """Returns f32[V] after one chunk; `read=None` is root at 0 and `write` later."""
        if read is None:
            read = self.num_slots if start == 0 else write
        chunk = self.chunk(tokens, start, pages=pages, read=read, write=write, **kwargs)
        logits, self.cache = self.prefill_fn(self.model.leaves, self.cache, chunk)
        return np.array(logits)

    def decode(self, tokens, lengths, *, pages, read, write) -> np.ndarray:
        """Returns f32[B, V]; `lengths` includes the token of this step."""
        lengths = np.asarray(lengths, np.int32)
        batch = DecodeBatch(
            tokens=jnp.asarray(tokens, jnp.int32),
            positions=jnp.broadcast_to(jnp.asarray(lengths - 1), (3, len(lengths))),
            block_tables=jnp.asarray(pages, jnp.int32),
            lengths=jnp.asarray(lengths),
            read_slots=jnp.asarray(read, jnp.int32),
            write_slots=jnp.asarray(write, jnp.int32),
        )
        logits, self.cache = self.decode_fn(self.model.leaves, self.cache, batch)
        return np.array(logits)

    def run(self, tokens, split, *, pages=(0, 1, 2), slot=0) -> np.ndarray:
        """Returns f32[V] after `tokens`: chunks of the sizes in `split`, then single decode steps."""
        done, logits = 0, None
        for size in split:
            logits = self.prefill(tokens[done : done + size], done, pages=pages, write=slot)
            done += size
        for index in range(done, len(tokens)):
            read = self.num_slots if index == 0 else slot
            rows = self.decode([tokens[index]], [index + 1], pages=[pages], read=[read], write=[slot])
            logits = rows[0]
        return logits


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    return REFERENCE


@functools.cache
def _load(kind: str) -> LoadedModel:
    return load_model(REFERENCE / kind, dtype="float32")


@pytest.fixture(scope="session")
def small_model():
    """`small_model(kind)` loads one of the small reference checkpoints once."""
    return _load


@pytest.fixture(scope="session")
def dense_server() -> Server:
    """One server of the dense checkpoint for the whole session, because its programs are compiled once."""
    return Server(_load("dense"))


@pytest.fixture(scope="session")
def make_server():
    return Server


@pytest.fixture(scope="session")
def page_tokens() -> int:
    return PAGE_TOKENS
