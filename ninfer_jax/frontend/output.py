"""Turns generated tokens into text, one committed batch at a time, and says where an answer ends (Q-5).

Owns the order of the steps: ids that end an answer, then characters, then stop strings, then channels. A
session is an immutable value: `OutputSession.preview` answers what accepting some tokens would mean and
returns the session after them, so that a batch that is aborted leaves nothing to undo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ninfer_jax.errors import InvariantError, OptionError
from ninfer_jax.frontend.channels import (
    MARKER_CHARACTERS,
    THINK_CLOSE,
    THINK_CLOSE_TEXT,
    THINK_OPEN,
    THINK_OPEN_TEXT,
    ChannelState,
    Delta,
    Mode,
    split_channels,
)
from ninfer_jax.frontend.stops import StopStrings, make_stop_strings
from ninfer_jax.frontend.tokenizer import TextTokenizer, decode_bytes

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What stays the same through one answer. Build with `make_output_rules`."""

    tokenizer: TextTokenizer | None  # None: token ids only, no text
    ending_ids: frozenset[int]  # end-of-sequence and stop ids together
    stops: StopStrings | None
    min_tokens: int  # the first so many tokens never end the answer
    max_tokens: int
    include_stop: bool  # whether the stop itself is part of the text
    wordless_ids: frozenset[int]  # markers, and special tokens that leave no text
    eventful_ids: frozenset[int]  # both of the above: no other id is more than its text
    markers: Mapping[int, str]  # thinking markers by id -> the character that stands for them
    splits_channels: bool


class Preview(NamedTuple):
    """What accepting tokens means. Nothing has happened until the caller keeps ``next``."""

    accepted: int  # 1..len(tokens); fewer when the answer ends inside the batch
    finish_reason: FinishReason | None
    stop_detail: str | int | None  # the stop string or the token id that ended the answer
    next: OutputSession
    deltas: tuple[Delta, ...]  # text that is now certain; everything, once the answer has ended


class OutputSession(NamedTuple):
    """One answer so far. Build with `open_output_session`.

    A tuple for the reason that `Delta` is one.
    """

    rules: OutputRules
    channel: ChannelState
    num_tokens: int = 0
    pending: bytes = b""  # bytes of a character that is not complete
    held: str = ""  # text that may be the beginning of a stop string
    canonical_tokens: int | None = 0
    """Tokens after which the visible text ends exactly, as a history renderer that trims it would end it
    (C-8).

    None where no token border is such a place: inside a character, after a token that mixes words with a
    trailing blank, after a cut stop string, or once a token left no text although it stays in the ledger.
    """
    finish_reason: FinishReason | None = None
    broken: bool = False  # a token without text came by; the text alone can no longer rebuild the tokens

    def preview(self, tokens: Sequence[int]) -> Preview:
        """Returns what accepting a prefix of some tokens does to the answer.

        Args:
            tokens: int[N], N >= 1, as the program produced them.
        Raises:
            InvariantError: if the answer has already ended, or there is no token.
        """
        if self.finish_reason is not None or len(tokens) == 0:
            raise InvariantError(
                f"preview of {len(tokens)} tokens on an answer that ended with {self.finish_reason!r}; "
                "expected at least one token on an open answer"
            )
        if len(tokens) == 1:
            plain = self._preview_plain(tokens[0])
            if plain is not None:
                return plain
        return self._preview_any(tokens)

    def _preview_plain(self, token: int) -> Preview | None:
        """Returns what `_preview_any` returns, for a token that only adds whole characters; None for others.

        Nearly every token of every answer, in about half of the time.
        """
        rules, channel, num_tokens, pending, held, canonical, _, broken = self
        count = num_tokens + 1
        if (
            token in rules.eventful_ids
            or count >= rules.max_tokens
            or rules.stops is not None
            or pending
            or held
        ):
            return None
        if rules.tokenizer is None:
            following = OutputSession(rules, channel, count, pending, held, canonical, None, broken)
            return Preview(1, None, None, following, ())
        word = rules.tokenizer.word(token)
        if word is None:
            return None
        if broken or (word.ends_blank and not word.is_blank):
            canonical = None
        elif not word.is_blank:
            canonical = count
        deltas, channel = _channels(rules, channel, word.text, final=False)
        following = OutputSession(rules, channel, count, pending, held, canonical, None, broken)
        return Preview(1, None, None, following, deltas)

    def _preview_any(self, tokens: Sequence[int]) -> Preview:
        rules = self.rules
        tokenizer, stops = rules.tokenizer, rules.stops
        count, pending, held = self.num_tokens, self.pending, self.held
        canonical, broken = self.canonical_tokens, self.broken
        released = ""
        reason: FinishReason | None = None
        detail: str | int | None = None
        accepted = 0
        for token in tokens:
            accepted += 1
            count += 1
            may_end = count > rules.min_tokens
            if may_end and token in rules.ending_ids:
                reason, detail = "stop", int(token)
                if rules.include_stop and tokenizer is not None:
                    more, pending = decode_bytes(pending, tokenizer.piece(token))
                    held += more
                break
            if tokenizer is not None:
                before, waiting = canonical, pending
                if token in rules.wordless_ids:
                    text, pending = _wordless_text(rules, token, pending)
                else:
                    text, pending = decode_bytes(pending, tokenizer.piece(token))
                if not text and pending == waiting:
                    broken = True
                if broken or pending:
                    canonical = None
                elif not text.isspace():
                    canonical = None if text[-1].isspace() or text[-1] in MARKER_CHARACTERS else count
                if stops is None or not may_end:
                    released += text
                else:
                    waited_chars = len(held)
                    held += text
                    hit = stops.find(held)
                    if hit is not None:
                        # The tokens so far end where the stop begins only if it begins with this very token.
                        canonical = before if waited_chars == 0 and hit.start == 0 else None
                        reason, detail, pending = "stop", hit.stop, b""
                        held = held[: hit.end if rules.include_stop else hit.start]
                        break
                    keep = stops.hold_start(held)
                    released += held[:keep]
                    held = held[keep:]
            if count >= rules.max_tokens:
                reason = "length"
                break
        if reason is not None:
            released += held + pending.decode("utf-8", "replace")
            held, pending = "", b""
        deltas, channel = _channels(rules, self.channel, released, final=reason is not None)
        following = OutputSession(rules, channel, count, pending, held, canonical, reason, broken)
        return Preview(accepted, reason, detail, following, deltas)

    def finish(self) -> tuple[Delta, ...]:
        """Returns the text still held, for an answer that ends from outside (cancelled, out of context).

        Empty when the answer has ended by itself: its last preview gave everything.
        """
        if self.finish_reason is not None:
            return ()
        text = self.held + self.pending.decode("utf-8", "replace")
        deltas, _ = _channels(self.rules, self.channel, text, final=True)
        return deltas


def make_output_rules(
    tokenizer: TextTokenizer | None,
    *,
    eos_token_ids: frozenset[int],
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    max_tokens: int,
    include_stop: bool = False,
    skip_special_tokens: bool = True,
    splits_channels: bool = True,
) -> OutputRules:
    """Returns the rules of one answer.

    Args:
        tokenizer: None where the checkpoint has none; then answers are token ids without text.
        eos_token_ids: the checkpoint's own ends, dropped by ``ignore_eos``.
        stop: texts that end the answer where they would appear.
        stop_token_ids: further ids that end the answer; ``ignore_eos`` leaves them alone.
        min_tokens: neither an id nor a text ends the answer within its first ``min_tokens`` tokens.
        max_tokens: the answer ends with "length" at this many tokens, >= 1.
        include_stop: whether the text keeps the stop string, or the text of the ending token.
        skip_special_tokens: whether special tokens leave no text.
        splits_channels: whether thinking blocks become the "reasoning" channel.
    Raises:
        OptionError: if a number is out of range, or a stop string is given without a tokenizer.
    """
    if max_tokens < 1 or not 0 <= min_tokens <= max_tokens:
        raise OptionError(
            f"got min_tokens={min_tokens}, max_tokens={max_tokens}; "
            "expected 0 <= min_tokens <= max_tokens, and max_tokens >= 1"
        )
    markers: dict[int, str] = {}
    if tokenizer is not None and splits_channels:
        for text, character in ((THINK_OPEN_TEXT, THINK_OPEN), (THINK_CLOSE_TEXT, THINK_CLOSE)):
            token = tokenizer.token_id(text)
            if token is not None:
                markers[token] = character
    ending_ids = frozenset(map(int, stop_token_ids)) | (frozenset() if ignore_eos else eos_token_ids)
    silent_ids = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
    aliases = {THINK_OPEN_TEXT: THINK_OPEN, THINK_CLOSE_TEXT: THINK_CLOSE} if markers else {}
    stops = make_stop_strings(stop, aliases)
    if stops is not None and tokenizer is None:
        raise OptionError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
    wordless_ids = silent_ids | markers.keys()
    return OutputRules(
        tokenizer=tokenizer,
        ending_ids=ending_ids,
        stops=stops,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        include_stop=include_stop,
        wordless_ids=wordless_ids,
        eventful_ids=ending_ids | wordless_ids,
        markers=markers,
        splits_channels=splits_channels,
    )


def open_output_session(rules: OutputRules, *, starts_in_reasoning: bool = False) -> OutputSession:
    """Returns the session of an answer that has not begun.

    Args:
        rules: from `make_output_rules`.
        starts_in_reasoning: the prompt already opened a thinking block, so no opening marker will come.
    """
    return OutputSession(rules, ChannelState(Mode.REASONING_FRESH if starts_in_reasoning else Mode.START))


def _wordless_text(rules: OutputRules, token: int, pending: bytes) -> tuple[str, bytes]:
    """What a marker becomes, ending any half character before it; other such tokens leave nothing."""
    marker = rules.markers.get(token)
    if marker is None:
        return "", pending
    return pending.decode("utf-8", "replace") + marker, b""


def _channels(
    rules: OutputRules, state: ChannelState, text: str, *, final: bool
) -> tuple[tuple[Delta, ...], ChannelState]:
    """What of some released text is certain, by channel."""
    if not rules.splits_channels:
        return ((Delta("content", text),) if text else ()), state
    if not text and not final:
        return (), state
    return split_channels(state, text, final=final)
