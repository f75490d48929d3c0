"""Text to token ids and token ids to text, for byte-level BPE vocabularies (the only kind Qwen3.5 has).

Owns the vocabulary and the rule that a character is never split between two pieces of text. It knows no
template, no stop string and no request.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer, models

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.frontend.token_bound import TokenBound, make_token_bound

REPLACEMENT = "\ufffd"


class Word(NamedTuple):
    """A token that is whole characters by itself."""

    text: str  # not empty
    is_blank: bool
    ends_blank: bool


class TextTokenizer:
    """Encodes whole texts and decodes tokens one at a time.

    The only mutable parts are caches of single tokens, filled on first use: building all 248,077 of them at
    start would cost more than most runs ever need.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Files saved after training may carry both; they would silently cut or fill every prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {index: token.content for index, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        # Ids are rows of the embedding, so what counts is the largest id and not how many tokens there are.
        largest = max([*tokenizer.get_vocab(with_added_tokens=True).values(), *self._added])
        self.vocab_size: int = largest + 1
        self._bytes_of_character = _byte_alphabet()
        self._pieces: dict[int, bytes] = {}
        self._bound: list[TokenBound | None] = []  # one entry once `least_tokens` has made it
        self._words: dict[int, Word | None] = {}

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """Returns the tokenizer of a ``tokenizer.json``.

        Raises:
            OptionError: if the file cannot be read or is not a byte-level BPE through and through: another
                model behind a byte-level decoder would read and write rubbish without a word.
        """
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception
            raise OptionError(f"{path} is not a readable tokenizer.json: {error}") from error
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise OptionError(f"{path} has an empty vocabulary")
        if (flaw := _flaw(tokenizer)) is not None:
            raise OptionError(
                f"{path} is not a byte-level BPE tokenizer, the only kind Qwen3.5 checkpoints use: {flaw}; "
                "remove the file to run on token ids alone"
            )
        return cls(tokenizer)

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that is exactly this text, or None."""
        return self._tokenizer.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; a special token's text is that token, and nothing is added."""
        return self.encode_with_offsets(text).ids

    def encode_with_offsets(self, text: str) -> Encoding:
        """Returns the ids of a text together with the characters that each of them covers.

        Raises:
            PromptError: if the text holds half of a surrogate pair, which no UTF-8 text can.
        """
        return self._tokenizer.encode(_valid(text), add_special_tokens=False)

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that a text has at least, found much faster than its tokens.

        The first call goes through the vocabulary, which takes as long as tokenising a long text.

        Raises:
            PromptError: as `encode_with_offsets`.
        """
        if not self._bound:
            self._bound.append(make_token_bound(self._tokenizer, self._bytes_of_character))
        bound = self._bound[0]
        return 0 if bound is None else bound.least_tokens(_valid(text))

    def piece(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of one token, perhaps part of a character; empty for ids without one."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._make_piece(int(token))
        return found

    def word(self, token: int) -> Word | None:
        """Returns what one token says where no character is pending; None if it ends inside a character."""
        try:
            return self._words[token]
        except KeyError:
            text, rest = decode_bytes(b"", self.piece(token))
            word = None if rest or not text else Word(text, text.isspace(), text[-1].isspace())
            self._words[token] = word
            return word

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of whole tokens; bytes that form no character become U+FFFD."""
        silent = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.piece(token) for token in tokens if token not in silent).decode(
            "utf-8", "replace"
        )

    def _make_piece(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.encode("utf-8")
        symbol = self._tokenizer.id_to_token(token) if token >= 0 else None
        if symbol is None:
            return b""
        try:
            return bytes([self._bytes_of_character[character] for character in symbol])
        except KeyError:  # a symbol outside the alphabet stands for its own text
            return symbol.encode("utf-8")


def _valid(text: str) -> str:
    """Returns the text; the Rust side would only say of some that they are no strings."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) "
            f"at character {error.start}, "
            "which is not valid Unicode; decode the input with errors='replace'"
        ) from error
    return text


def decode_bytes(pending: bytes, more: bytes) -> tuple[str, bytes]:
    """Returns the characters that are complete, and the bytes (at most 3) of the one that is not yet.

    Cutting the bytes anywhere gives the same text: what can still become a character is held back, everything
    else is replaced exactly as in one whole decode.
    """
    data = pending + more if pending else more
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


def token_border(encoding: Encoding, offset: int) -> int | None:
    """Returns how many tokens cover exactly the first ``offset`` characters, or None where a token crosses.

    Both neighbours must touch the offset: tokenizers that trim the spaces out of their offsets then publish
    nothing, instead of a border inside a token.
    """
    count = len(encoding)
    if count == 0:
        return 0 if offset == 0 else None
    if offset == 0:
        return 0
    following = encoding.char_to_token(offset)
    if following is None:  # past the last token
        last = encoding.token_to_chars(count - 1)
        return count if last is not None and last[1] == offset else None
    start = encoding.token_to_chars(following)
    before = encoding.token_to_chars(following - 1) if following else None
    if start is None or start[0] != offset or before is None or before[1] != offset:
        return None
    return following


def _byte_alphabet() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for; printable ones are themselves."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _flaw(tokenizer: Tokenizer) -> str | None:
    """Returns what keeps a tokenizer from turning any text into bytes of its vocabulary and back, or None."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return f"its model is {type(model).__name__}"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if getattr(model, name):
            return f"its {name} is {getattr(model, name)!r}, which would show in every answer"
    if not _has_byte_level_step(tokenizer.decoder, "decoders"):
        return "its decoder is not ByteLevel"
    if not (
        _has_byte_level_step(tokenizer.pre_tokenizer, "pretokenizers")
        or _has_byte_level_step(tokenizer.normalizer, "normalizers")
    ):
        return "its pre_tokenizer is not ByteLevel"
    missing = [byte for symbol, byte in _byte_alphabet().items() if tokenizer.token_to_id(symbol) is None]
    if missing:
        return f"{len(missing)} of the 256 bytes have no token (such as {min(missing):#04x})"
    return None


def _has_byte_level_step(component: object, steps_name: str) -> bool:
    """Whether a component of a tokenizer is ByteLevel, directly or as one step of a sequence."""
    if component is None:
        return False
    described = json.loads(component.__getstate__())  # type: ignore[attr-defined]
    return any(step.get("type") == "ByteLevel" for step in described.get(steps_name, [described]))
