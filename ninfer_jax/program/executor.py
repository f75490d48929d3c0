"""Owns the seam between Program and whatever computes: a chunk, step results and the Executor protocol.

It owns no device code (`execution`) and no pages: an executor runs exactly what the books say and decides
nothing.
Letters: B rows of a step, T tokens of a chunk, W width of a block table, K = 20 reported alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

from ninfer_jax.errors import InvariantError
from ninfer_jax.program.lane_sampling import LaneSampling

# A read slot that names no slot: the step begins from zero state (root).
ZERO_STATE = -1


@dataclass(frozen=True, eq=False)
class PrefillInputs:
    """One chunk of one prompt; arrays are copies that nobody changes afterwards."""

    tokens: np.ndarray  # int32[T], exact length
    positions: np.ndarray  # int32[3, T]
    block_table: np.ndarray  # int32[W], NO_PAGE where nothing is mapped
    start_tokens: int
    read_slot: int  # or ZERO_STATE
    write_slot: int


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of the drawn tokens and of the best alternatives."""

    drawn: np.ndarray  # f32[B]
    top_ids: np.ndarray  # int32[B, K]
    top: np.ndarray  # f32[B, K]


class StepResult(Protocol):
    """Tokens on their way; reading them blocks until the device is done."""

    def tokens(self) -> np.ndarray:
        """Returns int32[B], the drawn tokens."""
        ...

    def logprobs(self) -> Logprobs:
        """Returns what the drawn tokens and their alternatives were worth."""
        ...


class Transfer(Protocol):
    """A copy to Host under way."""

    def is_ready(self) -> bool:
        """Whether `finish` would not have to wait."""
        ...

    def wait(self) -> None:
        """Sleeps until it is ready."""
        ...

    def finish(self) -> None:
        """Waits, and puts the bytes where they belong."""
        ...


class Mover(Protocol):
    """Moves pages and state images. Host granules are pages of the arena.

    Copies to Host are polled; the others are queued before every later step.
    """

    def copy_pages_out(self, pages: Sequence[int], granules: Sequence[int]) -> Transfer:
        """Starts to copy Device pages to Host."""
        ...

    def copy_pages_in(self, granules: Sequence[int], pages: Sequence[int]) -> None:
        """Copies Host pages to Device."""
        ...

    def copy_page(self, source: int, destination: int) -> None:
        """Copies one Device page onto another."""
        ...

    def copy_image_out(self, slot: int, host_slot: int) -> Transfer:
        """Starts to copy a state image to Host."""
        ...

    def copy_image_in(self, host_slot: int, slot: int) -> None:
        """Copies a Host image into a Device slot."""
        ...

    def copy_image(self, source: int, destination: int) -> None:
        """Copies one Device slot onto another."""
        ...

    def read_pages(self, pages: Sequence[int]) -> Callable[[], np.ndarray]:
        """Starts to read Device pages as they are now; the function, from any thread, gives [N, ...]."""
        ...

    def read_host_pages(self, granules: Sequence[int]) -> Callable[[], np.ndarray]:
        """Reads Host pages, as above."""
        ...

    def write_pages(self, contents: np.ndarray, pages: Sequence[int]) -> None:
        """Writes [N, ...] into Device pages."""
        ...

    def write_host_pages(self, contents: np.ndarray, granules: Sequence[int]) -> None:
        """Writes [N, ...] into Host pages."""
        ...

    def read_image(self, slot: int) -> Callable[[], list[np.ndarray]]:
        """Starts to read a Device image as it is now; the function, from any thread, gives its leaves."""
        ...

    def read_host_image(self, host_slot: int) -> Callable[[], list[np.ndarray]]:
        """Reads a Host image, as above."""
        ...

    def write_image(self, leaves: Sequence[np.ndarray], slot: int) -> None:
        """Writes a Device image."""
        ...

    def write_host_image(self, leaves: Sequence[np.ndarray], host_slot: int) -> None:
        """Writes a Host image."""
        ...


class NoMover:
    """Stands where nothing is ever kept, so that nothing is ever copied."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InvariantError(f"{name} on an engine that was sized to keep nothing")


class Executor(Protocol):
    """What Program needs from a device; the real one and the model-free one both satisfy it."""

    @property
    def attention_backend(self) -> str:
        """Which attention kernels run, for reports."""
        ...

    @property
    def compilations_after_warmup(self) -> int:
        """Backend compilations since the executor was ready; anything but zero is a defect."""
        ...

    @property
    def mover(self) -> Mover:
        """Moves pages and images of these very buffers."""
        ...

    def set_lane(self, lane: int, sampling: LaneSampling, prompt_tokens: np.ndarray) -> None:
        """Prepares a lane's sampler for a new request: bias, bans, tokens seen, counts at zero."""
        ...

    def prefill(self, inputs: PrefillInputs) -> None:
        """Runs one chunk: K/V into the mapped pages, state and tail hidden into the write slot."""
        ...

    def draw_from_tail(self, rows: np.ndarray) -> StepResult:
        """Draws one token per row from the tail hidden in its read slot (no model step).

        Args:
            rows: int32[B, ROW_WIDTH + W], columns of `row_layout`; a copy that nobody changes afterwards.
        """
        ...

    def decode(self, rows: np.ndarray) -> StepResult:
        """Feeds one token per row and draws the next.

        Args:
            rows: int32[B, ROW_WIDTH + W], columns of `row_layout`; a copy that nobody changes afterwards.
        """
        ...

    def weights_digest(self) -> str:
        """Returns a digest of the weights' values, so that another revision of a model is noticed."""
        ...

    def reset(self) -> None:
        """Drops all cache and sampler contents and starts from fresh buffers (Q-7)."""
        ...

    def allocated_bytes(self) -> Mapping[str, int]:
        """Returns what each axis really holds, in the axis names of the memory table."""
        ...

    def close(self) -> None:
        """Frees every buffer; a second call does nothing."""
        ...
