"""Stop strings over a stream of text, whatever pieces the text arrives in.

Owns the search and the amount of text that must wait. The rule: the first character at which the text so far
ends with a stop string ends it; of several that end there, the longest is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_jax.errors import OptionError


@dataclass(frozen=True, slots=True)
class StopHit:
    """Where a stop string was found: characters [start, end) of the searched text."""

    start: int
    end: int
    stop: str


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The stop strings of one request. Build with `make_stop_strings`."""

    spellings: tuple[tuple[str, str], ...]  # (what to search for, what the caller wrote)
    first_characters: frozenset[str]
    longest_chars: int

    def find(self, text: str) -> StopHit | None:
        """Returns the first stop that is complete, or None."""
        best: StopHit | None = None
        for spelling, stop in self.spellings:
            start = text.find(spelling)
            if start < 0:
                continue
            end = start + len(spelling)
            if best is None or end < best.end or (end == best.end and start < best.start):
                best = StopHit(start, end, stop)
        return best

    def hold_start(self, text: str) -> int:
        """Returns how many characters may be released: the rest could be the beginning of a stop string.

        The text must hold no complete stop.
        """
        size = len(text)
        window = text[-(self.longest_chars - 1) :] if self.longest_chars > 1 else ""
        if self.first_characters.isdisjoint(window):
            return size
        for start in range(size - len(window), size):
            if text[start] in self.first_characters:
                tail = text[start:]
                for spelling, _ in self.spellings:
                    if spelling.startswith(tail):
                        return start
        return size


def make_stop_strings(
    stops: str | Sequence[str], aliases: dict[str, str] | None = None
) -> StopStrings | None:
    """Returns the stop strings to search for, or None when there are none.

    Args:
        stops: one string or several.
        aliases: text -> the character that stands for it in the stream when a marker token, not its letters,
            was generated; a stop that names the text finds both.
    Raises:
        OptionError: if a stop is empty or not a string.
    """
    texts = [stops] if isinstance(stops, str) else list(stops)
    spellings: dict[str, str] = {}
    for stop in texts:
        if not isinstance(stop, str) or not stop:
            raise OptionError(f"stop must hold non-empty strings, got {stop!r}; leave it out to stop nowhere")
        forms = {stop}
        for text, alias in (aliases or {}).items():
            # Every mixture would be exponential; a stop with several markers meets them all spelled one way.
            forms |= {form.replace(text, alias) for form in forms}
        for form in forms:
            spellings.setdefault(form, stop)
    if not spellings:
        return None
    return StopStrings(
        spellings=tuple(spellings.items()),
        first_characters=frozenset(form[0] for form in spellings),
        longest_chars=max(map(len, spellings)),
    )
