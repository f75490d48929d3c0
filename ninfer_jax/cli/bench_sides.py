"""The two sides of ``bench model``: this engine, and transformers on torch-CPU, behind one small interface.

Owns how each side is driven at its best; `bench_model` owns what is measured and in which order.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ninfer_jax.engine import Engine
from ninfer_jax.handle import RequestHandle
from ninfer_jax.sampling_params import SamplingParams


class Side(Protocol):
    """What is compared: wall-clock seconds of one repetition, and the tokens that it gives."""

    name: str

    def prefill_s(self, prompt: np.ndarray) -> float:
        """Returns the seconds from a prompt int32[T] to its first greedy token."""
        ...

    def decode_s(self, prompts: np.ndarray, num_steps: int) -> float:
        """Returns the seconds of `num_steps` greedy steps of all rows, after prompts int32[B, T]."""
        ...

    def greedy(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        """Returns the greedy continuation of a prompt int32[T]."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class EngineSide:
    """This engine as users meet it: requests in, published tokens out, driven by the calling thread.

    Scheduling, reservation, sampling, commit and output rules are all inside the measured time.
    """

    name = "ninfer_jax"

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine  # made with threaded=False
        self._clock = clock  # seconds

    def prefill_s(self, prompt: np.ndarray) -> float:
        """Times one request for a single token."""
        start = self._clock()
        self._submit(prompt, 1).result()
        return self._clock() - start

    def decode_s(self, prompts: np.ndarray, num_steps: int) -> float:
        """Times exactly `num_steps` rounds in which all rows decode together."""
        num_rows = len(prompts)
        # Rows admitted first are ahead by the rounds that run between the others' prefills.
        handles = [self._submit(prompt, num_steps + 4 * num_rows) for prompt in prompts]
        rounds = self._rounds(num_rows)
        while self._rounds(num_rows) == rounds:
            self.engine.step()
        rounds = self._rounds(num_rows)
        start = self._clock()
        for _ in range(num_steps):
            self.engine.step()
        seconds = self._clock() - start
        if self._rounds(num_rows) - rounds != num_steps:
            raise RuntimeError(f"expected {num_steps} decode rounds of {num_rows} rows; the measure is void")
        self._end(handles)
        return seconds

    def greedy(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        """Runs one request to its end."""
        return list(self._submit(prompt, num_tokens).result().token_ids)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()

    def _submit(self, prompt: np.ndarray, max_tokens: int) -> RequestHandle:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return self.engine.submit(prompt, sampling=sampling)

    def _end(self, handles: Sequence[RequestHandle]) -> None:
        for handle in handles:
            handle.cancel()
        for handle in handles:
            handle.result()

    def _rounds(self, num_rows: int) -> int:
        return self.engine.stats()["decode_rounds"].get(str(num_rows), 0)


class TransformersSide:
    """transformers on torch-CPU: float32, no gradients, KV and state cache, logits of the last token only.

    Its own forward in a bare loop, which is faster than its ``generate``; all rows of a batch have prompts of
    one length, so that it needs no padding mask.
    """

    name = "transformers"

    def __init__(self, directory: Path, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        # transformers 5.24 renames the argument of its cache and warns about the old name.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def prefill_s(self, prompt: np.ndarray) -> float:
        """Times one forward and the argmax of its last row."""
        start = time.perf_counter()
        self._start(prompt[None])
        return time.perf_counter() - start

    def decode_s(self, prompts: np.ndarray, num_steps: int) -> float:
        """Times forwards of one token per row; tokens reach the host every step, as they must to be shown."""
        tokens, cache = self._start(prompts)
        start = time.perf_counter()
        for _ in range(num_steps):
            tokens = self._step(tokens, cache)
        return time.perf_counter() - start

    def greedy(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        """Runs the loop for one row."""
        tokens, cache = self._start(prompt[None])
        drawn = [int(tokens)]
        while len(drawn) < num_tokens:
            tokens = self._step(tokens, cache)
            drawn.append(int(tokens))
        return drawn

    def close(self) -> None:
        """Drops the model."""
        self._model = None

    def _start(self, prompts: np.ndarray) -> tuple[Any, Any]:
        return self._forward(self._torch.from_numpy(prompts.astype(np.int64)), None)

    def _step(self, tokens: Any, cache: Any) -> Any:
        return self._forward(tokens[:, None], cache)[0]

    def _forward(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
            tokens = output.logits[:, -1].argmax(-1)
            tokens.tolist()
        return tokens, output[self._cache_name]
