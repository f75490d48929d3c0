"""Splits generated text into what the model thinks and what it answers.

Owns the reading of thinking blocks. It works on text that may arrive in any pieces, holds back only what
could still turn out to be a marker, and gives the same channels for every way of cutting the text.

A marker *token* arrives as one of two characters that no decoded text can contain (lone surrogates), so that
an answer which merely quotes the letters of a marker is not mistaken for one. Spelled-out markers count too
where they can only be meant: at the very start of an answer, and at the end of a thinking block.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

THINK_OPEN_TEXT = "<think>"
THINK_CLOSE_TEXT = "</think>"
THINK_OPEN = "\udc01"
THINK_CLOSE = "\udc02"
MARKER_CHARACTERS = THINK_OPEN + THINK_CLOSE

Channel = Literal["content", "reasoning"]


class Mode(enum.Enum):
    """Where in an answer the next character falls."""

    START = "start"  # nothing but blanks so far; a thinking block may open
    REASONING_FRESH = "reasoning_fresh"  # right after the opening marker; line ends belong to the layout
    REASONING = "reasoning"
    CONTENT_FRESH = "content_fresh"  # right after the closing marker; line ends belong to the layout
    CONTENT = "content"


class Delta(NamedTuple):
    """A piece of an answer that no later token can change.

    A tuple, because one is made per row and decode step, and a frozen dataclass takes four times as long.
    """

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class ChannelState:
    """Where the reader stands, and the text it still holds."""

    mode: Mode
    held: str = ""


def split_channels(state: ChannelState, text: str, *, final: bool) -> tuple[tuple[Delta, ...], ChannelState]:
    """Returns the text that is certain, by channel, and the state after it.

    Line ends next to a marker are layout and belong to no channel.

    Args:
        state: what the previous call returned.
        text: the next characters of the answer, marker tokens as their surrogates.
        final: nothing more will come, so nothing is held.
    """
    if THINK_OPEN not in text and THINK_CLOSE not in text:  # nearly every token of every answer
        if state.mode is Mode.CONTENT:
            return ((Delta("content", text),) if text else ()), state
        if state.mode is Mode.REASONING and not state.held and "<" not in text and text[-1:] != "\n":
            return ((Delta("reasoning", text),) if text else ()), state
    mode, rest = state.mode, state.held + text
    out: list[Delta] = []
    while True:
        if mode is Mode.CONTENT:
            cut = _first_of(rest, THINK_OPEN, THINK_CLOSE)
            if cut < 0:
                _emit(out, "content", rest)
                return tuple(out), ChannelState(mode)
            _emit(out, "content", rest[:cut])
            if rest[cut] == THINK_OPEN:
                mode = Mode.REASONING_FRESH
            rest = rest[cut + 1 :]  # a closing token where nothing is open has no meaning; it is dropped
        elif mode is Mode.REASONING:
            cut, after = _find_close(rest)
            again = rest.find(THINK_OPEN)
            if 0 <= again and (cut < 0 or again < cut):  # opening what is open has no meaning; it is dropped
                _emit(out, "reasoning", rest[:again])
                rest = rest[again + 1 :]
                continue
            if cut < 0:
                keep = len(rest) if final else _reasoning_hold(rest)
                _emit(out, "reasoning", rest[:keep])
                return tuple(out), ChannelState(mode, rest[keep:])
            _emit(out, "reasoning", rest[:cut].rstrip("\n"))
            mode, rest = Mode.CONTENT_FRESH, rest[after:]
        elif mode is Mode.CONTENT_FRESH:
            rest = rest.lstrip("\n")
            if not rest:
                return tuple(out), ChannelState(mode)
            mode = Mode.CONTENT
        else:  # START and REASONING_FRESH: a marker may come first
            body = rest.lstrip() if mode is Mode.START else rest.lstrip("\n")
            marker = _opening(body)
            if marker:
                mode, rest = Mode.REASONING_FRESH, body[marker:]
            elif not final and THINK_OPEN_TEXT.startswith(body):  # blanks only, or half a marker
                return tuple(out), ChannelState(mode, rest if mode is Mode.START else body)
            elif mode is Mode.START:
                mode = Mode.CONTENT
            else:
                mode, rest = Mode.REASONING, body


def _emit(out: list[Delta], channel: Channel, text: str) -> None:
    if not text:
        return
    if out and out[-1].channel == channel:
        text = out.pop().text + text
    out.append(Delta(channel, text))


def _opening(body: str) -> int:
    """Length of the opening marker that a text begins with, or 0."""
    if body.startswith(THINK_OPEN):
        return len(THINK_OPEN)
    return len(THINK_OPEN_TEXT) if body.startswith(THINK_OPEN_TEXT) else 0


def _first_of(text: str, *characters: str) -> int:
    places = [place for place in map(text.find, characters) if place >= 0]
    return min(places, default=-1)


def _find_close(text: str) -> tuple[int, int]:
    """Where the first closing marker begins and ends, token or letters; (-1, -1) without one."""
    by_token, by_text = text.find(THINK_CLOSE), text.find(THINK_CLOSE_TEXT)
    if by_token >= 0 and (by_text < 0 or by_token < by_text):
        return by_token, by_token + len(THINK_CLOSE)
    return (by_text, by_text + len(THINK_CLOSE_TEXT)) if by_text >= 0 else (-1, -1)


def _reasoning_hold(text: str) -> int:
    """How much reasoning is certain: half a closing marker waits, and so do line ends before it."""
    cut = len(text)
    place = text.rfind("<", max(0, cut - len(THINK_CLOSE_TEXT)))
    if place >= 0 and THINK_CLOSE_TEXT.startswith(text[place:]):
        cut = place
    while cut > 0 and text[cut - 1] == "\n":
        cut -= 1
    return cut
