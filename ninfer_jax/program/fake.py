"""Owns a model-free executor: pseudo tokens from a hash of the history, for fast engine tests.

It does not own any book. It behaves like a device that remembers: a state slot holds the digest of what was
fed into it, a page holds the fed tokens, and with `verify` every step proves that both agree with the block
table it was given. A wrong page, slot, position or length therefore shows up as a failed check and as
different tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_jax.errors import InvariantError
from ninfer_jax.options import PAGE_TOKENS
from ninfer_jax.program.capacity import CapacityVector, PoolCapacity, PoolKind, pages_for
from ninfer_jax.program.executor import ZERO_STATE, Logprobs, PrefillInputs
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.memory_table import SAMPLER, STATE_SLOTS, WEIGHTS, MemoryTable, pool_axis
from ninfer_jax.program.program import Program
from ninfer_jax.program.row_layout import (
    LANE,
    PROMPT_TOKENS,
    READ_SLOT,
    ROPE_DELTA,
    ROW_WIDTH,
    STEP,
    TOKEN,
    WRITE_SLOT,
)

_MASK = (1 << 64) - 1
_NUM_ALTERNATIVES = 20
FAKE_PAGE_BYTES, FAKE_IMAGE_BYTES = 1024, 4096  # only prices and reports read them


def mix(digest: int, value: int) -> int:
    """Returns the digest of a history extended by one number (splitmix64 finaliser over 64 bits)."""
    mixed = (digest * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def pseudo_token(digest: int, sampling: LaneSampling, step: int, vocab_size: int) -> int:
    """Returns the token that a history draws: a function of history, seed and output index alone.

    Args:
        digest: of all fed tokens and their positions.
        sampling: the lane's numbers; only seed, min_tokens and the banned ids matter here.
        step: output index of the token being drawn.
        vocab_size: tokens are 0..vocab_size-1.
    """
    drawn = mix(digest, sampling.seed * 0x10001 + step)
    token = drawn % vocab_size
    if step < sampling.min_tokens and sampling.ban_token_ids:
        banned = set(sampling.ban_token_ids)
        while token in banned:
            token = (token + 1) % vocab_size
    return token


def expected_tokens(
    prompt: np.ndarray, sampling: LaneSampling, num_tokens: int, vocab_size: int, *, rope_delta: int = 0
) -> list[int]:
    """Returns what a solo run of `FakeExecutor` draws, computed without pages, slots or batches.

    Args:
        prompt: int[S], plain text positions 0..S-1.
        sampling: the lane's numbers.
        num_tokens: how many tokens to draw.
        vocab_size: of the executor.
        rope_delta: added to the index of every generated token to give its position.
    """
    digest = 0
    for index, token in enumerate(prompt):
        digest = mix(mix(digest, int(token)), index)
    drawn: list[int] = []
    for step in range(num_tokens):
        drawn.append(pseudo_token(digest, sampling, step, vocab_size))
        digest = mix(mix(digest, drawn[-1]), len(prompt) + step + rope_delta)
    return drawn


@dataclass(frozen=True, eq=False)
class FakeResult:
    """Tokens that are there at once."""

    drawn: np.ndarray  # int32[B]

    def tokens(self) -> np.ndarray:
        """Returns int32[B]."""
        return self.drawn

    def logprobs(self) -> Logprobs:
        """Returns -1 for every drawn token and the ids 0.. as alternatives."""
        num_rows = len(self.drawn)
        return Logprobs(
            drawn=np.full(num_rows, -1.0, np.float32),
            top_ids=np.tile(np.arange(_NUM_ALTERNATIVES, dtype=np.int32), (num_rows, 1)),
            top=np.full((num_rows, _NUM_ALTERNATIVES), -1.0, np.float32),
        )


@dataclass(eq=False)
class FakeTransfer:
    """A copy to Host that needs some polls to arrive."""

    polls_left: int
    land: Callable[[], None]

    def is_ready(self) -> bool:
        """Whether enough polls went by."""
        self.polls_left -= 1
        return self.polls_left < 0

    def wait(self) -> None:
        """Lets it arrive."""
        self.polls_left = 0

    def finish(self) -> None:
        """Stores what was read when the copy was started."""
        self.land()


class FakeExecutor:
    """Satisfies `Executor` without a model or a device.

    Args:
        capacity: what a real executor would allocate.
        vocab_size: pseudo tokens are 0..vocab_size-1.
        verify: re-read the whole history through the block table in every step; linear in its length.
        before_step: called with "set_lane", "prefill", "draw_from_tail", "decode" or "copy" before anything
            happens; tests raise from it to play a device fault.
        copy_polls: how often a copy to Host is found unfinished.
    """

    def __init__(
        self,
        capacity: CapacityVector,
        *,
        vocab_size: int,
        verify: bool = False,
        before_step: Callable[[str], None] | None = None,
        copy_polls: int = 0,
    ) -> None:
        self.capacity = capacity
        self.copy_polls = copy_polls
        self.vocab_size = vocab_size
        self.verify = verify
        self.before_step = before_step
        self.closed = False
        self.num_steps = 0
        self.reset()

    @property
    def attention_backend(self) -> str:
        """There is no model."""
        return "none"

    @property
    def compilations_after_warmup(self) -> int:
        """Nothing is ever compiled here."""
        return 0

    @property
    def mover(self) -> FakeExecutor:
        """It moves its own pages and images."""
        return self

    def reset(self) -> None:
        """Starts from empty pages, slots and lanes."""
        num_pages = self.capacity.pools[0].num_pages
        self._pages = np.full((num_pages, PAGE_TOKENS, 2), -1, np.int64)  # token, position
        self._digests = [0] * self.capacity.num_state_slots
        self._covered = [0] * self.capacity.num_state_slots  # tokens fed into each slot
        self._lanes: dict[int, LaneSampling] = {}
        self._host_pages = np.full((self.capacity.num_host_pages, PAGE_TOKENS, 2), -1, np.int64)
        self._host_images = [(0, 0)] * self.capacity.num_host_state_slots  # digest, tokens covered

    def set_lane(self, lane: int, sampling: LaneSampling, prompt_tokens: np.ndarray) -> None:
        """Remembers the lane's numbers."""
        self._enter("set_lane")
        self._lanes[lane] = sampling

    def prefill(self, inputs: PrefillInputs) -> None:
        """Feeds one chunk."""
        self._enter("prefill")
        digest = self._read(inputs.read_slot, inputs.start_tokens)
        for offset, (token, position) in enumerate(
            zip(inputs.tokens.tolist(), inputs.positions[0].tolist(), strict=True)
        ):
            digest = self._feed(digest, token, position, inputs.block_table, inputs.start_tokens + offset)
        self._write(inputs.write_slot, digest, inputs.start_tokens + len(inputs.tokens), inputs.block_table)

    def draw_from_tail(self, rows: np.ndarray) -> FakeResult:
        """Draws from the slots' digests."""
        self._enter("draw_from_tail")
        drawn = [
            pseudo_token(self._digests[row[READ_SLOT]], self._lanes[row[LANE]], row[STEP], self.vocab_size)
            for row in rows.tolist()
        ]
        return FakeResult(np.array(drawn, np.int32))

    def decode(self, rows: np.ndarray) -> FakeResult:
        """Feeds one token per row and draws the next."""
        self._enter("decode")
        drawn = np.empty(len(rows), np.int32)
        for index, row in enumerate(rows.tolist()):
            length, table = row[PROMPT_TOKENS] + row[STEP], rows[index, ROW_WIDTH:]
            digest = self._read(row[READ_SLOT], length - 1)
            digest = self._feed(digest, row[TOKEN], length - 1 + row[ROPE_DELTA], table, length - 1)
            self._write(row[WRITE_SLOT], digest, length, table)
            drawn[index] = pseudo_token(digest, self._lanes[row[LANE]], row[STEP], self.vocab_size)
        return FakeResult(drawn)

    def copy_pages_out(self, pages: Sequence[int], granules: Sequence[int]) -> FakeTransfer:
        """Reads pages now, stores them when the copy is finished."""
        self._enter("copy")
        content, where = self._pages[list(pages)].copy(), list(granules)

        def land() -> None:
            self._host_pages[where] = content

        return FakeTransfer(self.copy_polls, land)

    def copy_pages_in(self, granules: Sequence[int], pages: Sequence[int]) -> None:
        """Copies Host pages to Device."""
        self._enter("copy")
        self._pages[list(pages)] = self._host_pages[list(granules)]

    def copy_page(self, source: int, destination: int) -> None:
        """Copies one Device page onto another."""
        self._enter("copy")
        self._pages[destination] = self._pages[source]

    def copy_image_out(self, slot: int, host_slot: int) -> FakeTransfer:
        """Reads an image now, stores it when the copy is finished."""
        self._enter("copy")
        image = self._digests[slot], self._covered[slot]

        def land() -> None:
            self._host_images[host_slot] = image

        return FakeTransfer(self.copy_polls, land)

    def copy_image_in(self, host_slot: int, slot: int) -> None:
        """Copies a Host image into a Device slot."""
        self._enter("copy")
        self._digests[slot], self._covered[slot] = self._host_images[host_slot]

    def copy_image(self, source: int, destination: int) -> None:
        """Copies one Device slot onto another."""
        self._enter("copy")
        self._digests[destination], self._covered[destination] = self._digests[source], self._covered[source]

    def read_pages(self, pages: Sequence[int]) -> Callable[[], np.ndarray]:
        """Reads int64[N, 64, 2]."""
        contents = self._pages[list(pages)].copy()
        return lambda: contents

    def read_host_pages(self, granules: Sequence[int]) -> Callable[[], np.ndarray]:
        """Reads int64[N, 64, 2]."""
        contents = self._host_pages[list(granules)].copy()
        return lambda: contents

    def write_pages(self, contents: np.ndarray, pages: Sequence[int]) -> None:
        """Writes Device pages."""
        self._enter("copy")
        self._pages[list(pages)] = contents

    def write_host_pages(self, contents: np.ndarray, granules: Sequence[int]) -> None:
        """Writes Host pages."""
        self._host_pages[list(granules)] = contents

    def read_image(self, slot: int) -> Callable[[], list[np.ndarray]]:
        """Reads int64[2]: digest and tokens covered."""
        leaf = np.array([self._digests[slot], self._covered[slot]], np.uint64).view(np.int64)
        return lambda: [leaf]

    def read_host_image(self, host_slot: int) -> Callable[[], list[np.ndarray]]:
        """Reads int64[2]: digest and tokens covered."""
        leaf = np.array(self._host_images[host_slot], np.uint64).view(np.int64)
        return lambda: [leaf]

    def write_image(self, leaves: Sequence[np.ndarray], slot: int) -> None:
        """Writes a Device image."""
        self._enter("copy")
        self._digests[slot], self._covered[slot] = leaves[0].view(np.uint64).tolist()

    def write_host_image(self, leaves: Sequence[np.ndarray], host_slot: int) -> None:
        """Writes a Host image."""
        digest, covered = leaves[0].view(np.uint64).tolist()
        self._host_images[host_slot] = digest, covered

    def weights_digest(self) -> str:
        """There are no weights, only a vocabulary."""
        return f"none {self.vocab_size}"

    def allocated_bytes(self) -> Mapping[str, int]:
        """Returns what a real executor of this capacity would hold."""
        pages = {pool_axis(pool.kind.value): pool.num_pages * pool.page_bytes for pool in self.capacity.pools}
        states = self.capacity.num_state_slots * self.capacity.state_image_bytes
        return {WEIGHTS: 0, SAMPLER: 0, STATE_SLOTS: states, **pages}

    def close(self) -> None:
        """Drops everything."""
        self.closed = True
        self.reset()

    def _enter(self, step: str) -> None:
        if self.closed:
            raise InvariantError(f"{step} on a closed executor")
        if self.before_step is not None:
            self.before_step(step)
        self.num_steps += 1

    def _read(self, slot: int, expected_tokens: int) -> int:
        covered = 0 if slot == ZERO_STATE else self._covered[slot]
        if covered != expected_tokens:
            raise InvariantError(
                f"state slot {slot} covers {covered} tokens, the step starts at {expected_tokens}"
            )
        return 0 if slot == ZERO_STATE else self._digests[slot]

    def _feed(self, digest: int, token: int, position: int, table: np.ndarray, index: int) -> int:
        page = int(table[index // PAGE_TOKENS])
        if not 0 <= page < len(self._pages):
            raise InvariantError(
                f"token {index} falls on logical page {index // PAGE_TOKENS}, which maps {page}"
            )
        self._pages[page, index % PAGE_TOKENS] = token, position
        return mix(mix(digest, token), position)

    def _write(self, slot: int, digest: int, covered: int, table: np.ndarray) -> None:
        self._digests[slot] = digest
        self._covered[slot] = covered
        if self.verify:
            used = table[: -(-covered // PAGE_TOKENS)]
            history = self._pages[used].reshape(-1, 2)[:covered].tolist()
            reread = 0
            for token, position in history:
                reread = mix(mix(reread, token), position)
            if reread != digest:
                raise InvariantError(
                    f"the pages {used.tolist()} do not hold the history of state slot {slot}"
                )


def open_fake_program(
    *,
    num_lanes: int = 2,
    max_context_tokens: int = 512,
    num_pages: int | None = None,
    extra_state_slots: int = 0,
    prefill_chunk_tokens: int = 128,
    vocab_size: int = 64,
    verify: bool = False,
    before_step: Callable[[str], None] | None = None,
    host_state_slots: int = 0,
    host_pages: int = 0,
    copy_polls: int = 0,
    on_operation: Callable[[str], None] | None = None,
) -> Program:
    """Returns a Program over a `FakeExecutor`.

    Args:
        num_lanes: C.
        max_context_tokens: of prompt and output together.
        num_pages: M; what C longest sequences need when None.
        extra_state_slots: H.
        prefill_chunk_tokens: the longest chunk.
        vocab_size: see `FakeExecutor`, like the two below.
        verify: re-read the whole history in every step.
        before_step: called before every device operation; may raise.
        host_state_slots, host_pages: sizes of the Host tier.
        copy_polls: see `FakeExecutor`.
        on_operation: see `Program`.
    """
    if num_pages is None:
        num_pages = num_lanes * pages_for(max_context_tokens)
    capacity = CapacityVector(
        num_lanes=num_lanes,
        max_context_tokens=max_context_tokens,
        num_state_slots=num_lanes + extra_state_slots,
        state_image_bytes=FAKE_IMAGE_BYTES,
        pools=(PoolCapacity(PoolKind.MAIN, num_pages, FAKE_PAGE_BYTES),),
        num_host_state_slots=host_state_slots,
        host_kv_bytes=host_pages * FAKE_PAGE_BYTES,
    )
    executor = FakeExecutor(
        capacity, vocab_size=vocab_size, verify=verify, before_step=before_step, copy_polls=copy_polls
    )
    return Program(
        capacity,
        executor,
        prefill_chunk_tokens=prefill_chunk_tokens,
        memory=MemoryTable((), free_bytes=0, headroom_bytes=0),
        on_operation=on_operation,
    )
