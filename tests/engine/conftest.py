"""Engines without a model: real frontend, worker and program over the model-free executor, fake clock."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ninfer_jax import worker
from ninfer_jax.engine import Engine
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.frontend.generation_config import GenerationConfig
from ninfer_jax.frontend.tokenizer import TextTokenizer
from ninfer_jax.options import make_engine_options, resolve
from ninfer_jax.parts import EngineParts, ModelFacts
from ninfer_jax.program.capacity import CapacityVector, PoolCapacity, PoolKind, pages_for
from ninfer_jax.program.fake import FakeExecutor, expected_tokens
from ninfer_jax.program.memory_table import MemoryTable
from ninfer_jax.program.program import Program
from ninfer_jax.results import Finished, GenerationStart
from ninfer_jax.sampling_params import SamplingParams

EOS = 256
BYTE_VOCAB = 258  # 256 bytes, the end token, one more special


class FakeClock:
    """Nanoseconds that pass only when a test says so, plus one tick for each reading."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture(scope="session")
def byte_tokenizer_file(tmp_path_factory) -> Path:
    """One token for each byte: every text is exact, and random tokens are often no text at all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<other>", special=True)])
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_file) -> TextTokenizer:
    return TextTokenizer.from_file(byte_tokenizer_file)


@dataclass(frozen=True, eq=False)
class Kit:
    """Short ways to make engines, and to say what they must answer."""

    byte_tokenizer: TextTokenizer
    opened: list[Engine] = field(default_factory=list)

    def frontend(self, *, vocab: int = 50, text: bool = False, eos: frozenset[int] = frozenset()) -> Frontend:
        return Frontend(
            source="fake",
            vocab_size=BYTE_VOCAB if text else vocab,
            tokenizer=self.byte_tokenizer if text else None,
            template=None,
            generation=GenerationConfig(frozenset({EOS}) if text else eos, {}),
            clock=lambda: datetime(2030, 1, 1),
        )

    def parts(
        self,
        *,
        pages: int | None = None,
        text: bool = False,
        vocab: int = 50,
        eos: frozenset[int] = frozenset(),
        before_step: Callable[[str], None] | None = None,
        chunk: int = 16,
        **options: Any,
    ) -> EngineParts:
        resolved = resolve(
            make_engine_options(**{"max_context": 256, "prefill_chunk": chunk, **options}), platform="cpu"
        )
        frontend = self.frontend(vocab=vocab, text=text, eos=eos)
        capacity = CapacityVector(
            num_lanes=resolved.max_concurrency,
            max_context_tokens=resolved.max_context,
            num_state_slots=resolved.total_device_state_slots,
            state_image_bytes=100,
            pools=(
                PoolCapacity(
                    PoolKind.MAIN,
                    pages or resolved.max_concurrency * pages_for(resolved.max_context),
                    page_bytes=1000,
                ),
            ),
            num_host_state_slots=resolved.cache.host_state_slots,
            host_kv_bytes=min(resolved.cache.host_kv_capacity_bytes, 64_000),
        )
        executor = FakeExecutor(
            capacity, vocab_size=frontend.vocab_size, verify=False, before_step=before_step
        )
        program = Program(capacity, executor, prefill_chunk_tokens=chunk, memory=MemoryTable((), 0, 0))
        facts = ModelFacts("fake", "0" * 8, 4, 1, False, frontend.vocab_size, "float32", "none")
        return EngineParts(options=resolved, frontend=frontend, program=program, model=facts)

    def engine(
        self, *, threaded: bool = False, clock: Callable[[], int] | None = None, **parts: Any
    ) -> Engine:
        clocks = {} if threaded else {"clock": clock or FakeClock()}
        engine = Engine(self.parts(**parts), threaded=threaded, **clocks)
        self.opened.append(engine)
        return engine

    def solo(self, engine: Engine, prompt: list[int], params: SamplingParams, *, seed: int = 0) -> list[int]:
        """What one request alone must draw, computed without pages, lanes or batches; stops not applied."""
        frontend = engine._parts.frontend
        lane = params.resolved({}).lane(eos_token_ids=frontend.eos_token_ids, default_seed=seed)
        return expected_tokens(np.asarray(prompt), lane, params.max_tokens or 1, frontend.vocab_size)

    def drain(self, engine: Engine, limit: int = 100_000) -> int:
        """Steps until nothing is left to do; returns how many steps that took."""
        for steps in range(limit):
            if not engine.step():
                return steps
        raise AssertionError(f"still busy after {limit} steps")

    def assert_quiet(self, engine: Engine) -> None:
        """Nothing waits, nothing runs, the books agree with a recount, and what is kept can all be let go."""
        stats = engine.stats()
        assert (stats["waiting"], stats["active"], stats["cache"]["edges"]) == (0, 0, 0)
        for axis in ("lanes", "execution_rows", "open_batches", "main_pages_reserved"):
            assert stats["occupancy"][axis] == 0
        engine._parts.program.check()
        engine.clear_cache()
        assert {axis: used for axis, used in engine.stats()["occupancy"].items() if used} == {}
        engine._parts.program.check()

    def assert_well_formed(self, events: list[Any]) -> None:
        """One start first, one end last, deltas between; tokens and text add up to the result."""
        assert [type(event) for event in events].count(GenerationStart) == 1
        assert isinstance(events[0], GenerationStart) and isinstance(events[-1], Finished)
        result, deltas = events[-1].result, events[1:-1]
        assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
        assert "".join(delta.text for delta in deltas if delta.channel == "content") == result.text


@pytest.fixture
def kit(byte_tokenizer, monkeypatch):
    # A standing clock never ends a search, and what these tests ask does not depend on how good a plan is:
    # the correctness incumbents alone decide (G-11).
    monkeypatch.setattr(worker, "ALONE_ALLOWANCE_NS", 0)
    monkeypatch.setattr(worker, "SHARED_ALLOWANCE_NS", 0)
    made = Kit(byte_tokenizer)
    yield made
    for engine in made.opened:
        engine.close()


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """The module `reuse_lab`: engines that reuse context, and a watch over every transition."""
    name = "ninfer_tests_engine_reuse_lab"
    if name not in sys.modules:  # under importlib mode a test file cannot import its neighbours
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("reuse_lab.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def fake_clock():
    return FakeClock()
